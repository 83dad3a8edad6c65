"""Starts the worker groups of a run on one pool of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.distributed.group.device_pool import Device, DevicePool
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.groups import WorkerGroups
from unirl.distributed.runtime import Runtime
from unirl.distributed.stages import LedStages
from unirl.distributed.tensor.planes.base import DataPlane, ObjectPlane
from unirl.distributed.worker import Builder


@dataclass(frozen=True)
class GroupPlan:
    """One group of workers: how they are built, and their devices of the pool."""

    name: str
    builder: Builder
    devices: Sequence[int]
    roles: Sequence[str] = ()
    """Roles that this group has instead of the first group."""


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
    device: Device,
    num_nodes: int = 1,
    cpus_per_device: float = 1.0,
    address: str = "auto",
    timeout_s: float = 3600.0,
    start_timeout_s: float = 300.0,
    pushes: Sequence[Push] = (),
    stages: Mapping[str, str] | None = None,
    plane: DataPlane | None = None,
) -> Runtime:
    """Start the groups in order. Groups that share a device take turns on it.

    stages: track -> the group whose component "engine" makes it, if several groups make one response (`LedStages`).
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
        blocks = pool.blocks({plan.name: plan.devices for plan in plans})
        started: dict[str, RayRuntime] = {}
        for plan in plans:
            started[plan.name] = RayRuntime(
                plan.builder,
                num_devices=len(plan.devices),
                device=device,
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
                block=blocks[plan.name],
                plane=plane,
            )
            unfinished.callback(started[plan.name].close)
        first = plans[0]
        main, devices = started[first.name], {plan.name: list(plan.devices) for plan in plans}
        for push in pushes if main.has_role("sync") else ():
            engines = started[push.group].remote_role(push.engine)
            shares_device = len(first.devices) == 1 and devices[push.group] == list(first.devices)
            own = (engines, shares_device) if push.policy is None else (engines, shares_device, push.policy)
            main.role("sync").connect_elsewhere(*own)
        elsewhere = {role: started[plan.name] for plan in plans[1:] for role in plan.roles}
        engine_of = {group: started[group].role("engine") for group in (stages or {}).values()}
        led = {"engine": LedStages({track: engine_of[group] for track, group in stages.items()})} if stages else {}
        groups = WorkerGroups(main, elsewhere, led=led, on_close=pool.close)
        unfinished.pop_all()
    return groups
