"""Starts the worker groups of a run on one pool of devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.distributed.group.device_pool import Block, DevicePool
from unirl.distributed.group.object_store import ObjectStore
from unirl.distributed.group.ray_hosting import HostingPlan, RayHostedPool
from unirl.distributed.group.ray_member import RayMember
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.groups import WorkerGroups
from unirl.distributed.pools.lent import LentMembers
from unirl.distributed.pools.served import ServedPool
from unirl.distributed.rewards import LedRewards
from unirl.distributed.runtime import Runtime
from unirl.distributed.stages import LedStages
from unirl.distributed.tensor.planes.base import DataPlane, ObjectPlane
from unirl.distributed.weight_sync.served_syncs import PushedPool, ServedSyncs
from unirl.distributed.worker import Builder
from unirl.types.device_kinds import DeviceName


@dataclass(frozen=True)
class GroupPlan:
    """One group of workers: how they are built, and their devices of the pool."""

    name: str
    builder: Builder
    devices: Sequence[int]
    roles: Sequence[str] = ()
    """Roles that this group has instead of the first group."""
    is_served: bool = False
    """True: each device has a member of a served pool (`unirl.distributed.pools.served`)."""
    num_members: int | None = None
    """Members of a served pool to begin with; None: one on each device."""
    rows_per_call: int | None = None
    """Samples per call of a served pool, see `ServedPool`."""


@dataclass(frozen=True)
class Push:
    """Engines to which the component "sync" of the first group pushes."""

    group: str
    engine: str
    """Name of the component."""
    policy: str | None = None
    """The pushed policy, if "sync" has several."""


def start_groups(
    plans: Sequence[GroupPlan],
    *,
    num_devices: int,
    device: DeviceName,
    num_nodes: int = 1,
    cpus_per_device: float = 1.0,
    address: str = "auto",
    timeout_s: float = 3600.0,
    start_timeout_s: float = 300.0,
    pushes: Sequence[Push] = (),
    stages: Mapping[str, str] | None = None,
    reward_parts: Sequence[str] = (),
    plane: DataPlane | None = None,
    hosting: Sequence[HostingPlan] = (),
) -> Runtime:
    """Start the groups in order. Groups that share a device take turns on it.

    stages: track -> the group whose component "engine" makes it, if several groups make one response (`LedStages`).
    reward_parts: groups whose component "reward" has some of the scorers (`LedRewards`).
    hosting: pools without devices, which are started first; each group's builder gets them as the keyword `hosting`.
    Other arguments: see `DevicePool` and `RayRuntime`.
    Raises what they raise, after stopping everything that was started.
    """
    with contextlib.ExitStack() as unfinished:
        plane = plane or ObjectPlane()
        pool = DevicePool(
            num_devices,
            device,
            num_nodes=num_nodes,
            cpus_per_device=cpus_per_device,
            address=address,
            start_timeout_s=start_timeout_s,
        )
        unfinished.callback(pool.close)
        blocks = pool.blocks({name: devices for plan in plans for name, devices in _blocks(plan).items()})
        options = {"device": device, "timeout_s": timeout_s, "start_timeout_s": start_timeout_s, "plane": plane}
        hosted = {}
        for each in hosting:
            hosted[each.name] = RayHostedPool.started(each, pool.node_ids(), start_timeout_s)
            unfinished.callback(hosted[each.name].close)
        if hosted:
            plans = [replace(plan, builder=_offered(plan.builder, hosted)) for plan in plans]
        started: dict[str, RayRuntime | ServedPool] = {}
        for plan in plans:
            started[plan.name] = _served(plan, blocks, options) if plan.is_served else _even(plan, blocks, options)
            unfinished.callback(started[plan.name].close)
        first = plans[0]
        main, devices = started[first.name], {plan.name: list(plan.devices) for plan in plans}
        served = []
        for push in pushes if main.has_role("sync") else ():
            group = started[push.group]
            shares_device = len(first.devices) == 1 and devices[push.group] == list(first.devices)
            if isinstance(group, ServedPool):
                served.append(PushedPool(group, push.engine, shares_device, push.policy))
                continue
            own = () if push.policy is None else (push.policy,)
            main.role("sync").connect_elsewhere(group.remote_role(push.engine), shares_device, *own)
        lent = [
            LentMembers(group, numbers, ["engine"] if "engine" in plan.roles else plan.roles)
            for plan in plans[1:]
            for group in [started[plan.name]]
            for numbers in [[number for number, own in enumerate(plan.devices) if own in first.devices]]
            if isinstance(group, ServedPool) and numbers
        ]
        elsewhere = {role: started[plan.name] for plan in plans[1:] for role in plan.roles}
        engine_of = {group: started[group].role("engine") for group in (stages or {}).values()}
        led: dict[str, object] = {}
        if stages:
            led["engine"] = LedStages({track: engine_of[group] for track, group in stages.items()})
        if reward_parts:
            parts = [started[name].role("reward") for name in reward_parts]
            led["reward"] = LedRewards(parts, elsewhere.get("reward", main).role("reward"))
        if served:
            led["sync"] = ServedSyncs(main.role("sync"), served)
        groups = WorkerGroups(main, elsewhere, led=led, pools=started, hosting=hosted, lent=lent, on_close=pool.close)
        unfinished.pop_all()
    return groups


def _offered(builder: Any, hosted: Mapping[str, RayHostedPool]) -> Builder:  # Any: it takes one keyword more
    return functools.partial(builder, hosting=hosted)


def _blocks(plan: GroupPlan) -> dict[str, Sequence[int]]:
    """Name -> devices of the blocks of a group: one for each member of a served pool."""
    if not plan.is_served:
        return {plan.name: plan.devices}
    return {f"{plan.name}-{number}": [device] for number, device in enumerate(plan.devices)}


def _even(plan: GroupPlan, blocks: Mapping[str, Block], options: Mapping[str, Any]) -> RayRuntime:
    return RayRuntime(plan.builder, num_devices=len(plan.devices), block=blocks[plan.name], **options)


def _served(plan: GroupPlan, blocks: Mapping[str, Block], options: Mapping[str, Any]) -> ServedPool:
    """The members, which load at the same time; devices without one are for those that join later."""
    names = list(_blocks(plan))

    def member(number: int) -> RayMember:
        name = names[number]
        return RayMember(name, lambda: RayRuntime(plan.builder, num_devices=1, block=blocks[name], **options))

    return ServedPool(
        plan.name,
        member,
        plan.num_members or len(names),
        ObjectStore(),
        num_devices=len(names),
        rows_per_call=plan.rows_per_call,
    )
