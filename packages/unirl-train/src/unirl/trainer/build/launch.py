"""Starts the runtime that a recipe names and builds its workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.config import instantiate
from unirl.config.environment_pools import EnvironmentPool, environment_pools
from unirl.config.placement import REWARD, SCORERS, WorkerGroup, cluster_shape, groups_of_run
from unirl.config.runs import ComposedRun
from unirl.distributed.pools.hosting import HostedPool, LocalHosting
from unirl.distributed.runtime import LocalRuntime, Runtime
from unirl.trainer.build.worker import build_components, pushed_role
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET

POOL_MEMBER = "unirl.rollout.environments.pool_member.PoolMember"
"""Class of what a member of a pool of kind env hosts."""


def make_runtime(
    run: ComposedRun, run_dir: Path, *, asks_teachers: bool = True, is_exported: bool = False, scores: bool = True
) -> Runtime:
    """The runtime that the recipe names, with its workers built; see `build_components`."""
    builder = functools.partial(
        build_components, run, str(run_dir), asks_teachers=asks_teachers, is_exported=is_exported, scores=scores
    )
    pools = [] if is_exported else environment_pools(run)
    if run.file.runtime == "ray":
        return _start_on_ray(run, builder, pools)
    if run.num_devices != 1:
        raise ConfigError(f"runtime: local uses one device, num_devices = {run.num_devices}. Set runtime: ray.")
    hosting = {pool.name: _local_pool(pool) for pool in pools}
    with contextlib.ExitStack() as unfinished:
        for each in hosting.values():
            unfinished.callback(each.close)
        runtime = LocalRuntime(functools.partial(builder, hosting=hosting), device=run.device, hosting=hosting)
        unfinished.pop_all()
    return runtime


def _member_maker(pool: EnvironmentPool) -> Callable[[], Any]:  # Any: the class is of another package
    return functools.partial(instantiate, {TARGET: POOL_MEMBER, "num_processes": pool.num_processes})


def _local_pool(pool: EnvironmentPool) -> HostedPool:
    """Members are objects of this process, whose processes are its children."""
    make = _member_maker(pool)
    return HostedPool(pool.name, lambda _, key: LocalHosting(key, make), pool.num_members or 1)


def _start_on_ray(
    run: ComposedRun, builder: Callable[..., Mapping[str, object]], pools: Sequence[EnvironmentPool]
) -> Runtime:
    """Start the workers of a recipe's placement on its cluster, and connect engines in other groups to the trainer."""
    # Ray is heavy and optional; a local run never imports it.
    from unirl.distributed.group.ray_hosting import HostingPlan
    from unirl.distributed.group.ray_runtime import RayRuntime
    from unirl.distributed.group.start import GroupPlan, Push, start_groups
    from unirl.distributed.tensor.planes.choice import make_plane

    cluster = run.file.cluster
    options: dict[str, Any] = {
        "num_devices": run.num_devices,
        "device": run.device,
        "num_nodes": cluster_shape(run.num_devices, cluster).num_nodes,
        "cpus_per_device": cluster.cpus_per_device,
        "address": cluster.address,
        "timeout_s": cluster.timeout_s,
        "start_timeout_s": cluster.start_timeout_s,
        "plane": make_plane(cluster.transport, cluster.transfer_queue, cluster.timeout_s),
    }
    groups = groups_of_run(run)
    hosting = [
        HostingPlan(pool.name, _member_maker(pool), pool.num_members, pool.nodes, pool.num_cpus) for pool in pools
    ]
    if not hosting and len(groups) == 1 and len(groups[0].devices) == run.num_devices:
        return RayRuntime(builder, **options)
    train, *others = groups
    plans = [
        GroupPlan(
            group.name,
            functools.partial(builder, holds=group.holds),
            group.devices,
            _roles(run, group),
            is_served=group.given.is_served,
            num_members=group.given.members,
            rows_per_call=group.given.samples_per_call,
        )
        for group in groups
    ]
    pushes = [
        Push(group.name, pushed_role(stage), policy.name if run.is_staged else None)
        for policy in run.policies.values()
        for stage in [run.pushed_stage(policy)]
        for group in others
        if policy.sync is not None and stage is not None and stage.at in group.holds
    ]
    parts = [g.name for g in groups if REWARD not in g.holds and any(p.startswith(SCORERS) for p in g.holds)]
    return start_groups(plans, pushes=pushes, stages=_led(run, groups), reward_parts=parts, hosting=hosting, **options)


def _roles(run: ComposedRun, group: WorkerGroup) -> list[str]:
    """Roles that a group has instead of the first group."""
    engines = [stage.at for stage in run.stages if stage.at in group.holds]
    joined = ["engine"] if len(engines) == len(run.stages) else []
    return [*dict.fromkeys([*joined, *engines]), *([REWARD] if REWARD in group.holds else [])]


def _led(run: ComposedRun, groups: Sequence[WorkerGroup]) -> dict[str, str]:
    """Track -> name of the group that makes it, if several groups make one response."""
    found = {str(s.track): group.name for s in run.stages for group in groups if s.at in group.holds}
    return found if len(set(found.values())) > 1 else {}
