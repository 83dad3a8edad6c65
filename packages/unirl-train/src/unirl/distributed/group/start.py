"""The worker groups of a run on one pool of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from unirl.distributed.group.device_pool import Device, DevicePool
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.groups import WorkerGroups
from unirl.distributed.runtime import Runtime
from unirl.distributed.tensor.planes.base import DataPlane, ObjectPlane
from unirl.distributed.worker import Builder


@dataclass(frozen=True)
class GroupPlan:
    """One group of workers: how they are built, and the devices of the pool that they have."""

    name: str
    builder: Builder
    devices: Sequence[int]
    roles: Sequence[str] = ()
    """Roles that are found here rather than in the first group."""


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
    pushes_from: str | None = None,
    pushes_to: str | None = None,
    plane: DataPlane | None = None,
) -> Runtime:
    """Start the groups one after the other, the first one first. Groups that have the same device take turns there.

    pushes_from, pushes_to: the weight sync of the first group and the engine that it pushes to, where that is with
    other workers; both are names of components. The other arguments: see `DevicePool` and `RayRuntime`.
    Raises what they raise, and leaves nothing behind.
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
        elsewhere = {role: started[plan.name] for plan in plans for role in plan.roles}
        if pushes_from is not None and pushes_to in elsewhere and started[plans[0].name].has_role(pushes_from):
            engines = elsewhere[pushes_to].remote_role(pushes_to)
            (to,) = (plan for plan in plans if pushes_to in plan.roles)
            shares_device = len(to.devices) == 1 and list(to.devices) == list(plans[0].devices)
            started[plans[0].name].role(pushes_from).connect_elsewhere(engines, shares_device)
        groups = WorkerGroups(started[plans[0].name], elsewhere, on_close=pool.close)
        unfinished.pop_all()
    return groups
