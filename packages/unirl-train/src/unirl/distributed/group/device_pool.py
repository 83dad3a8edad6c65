"""The devices of a run as Ray placement groups, and named blocks of them.

One placement group a node keeps neighbouring ranks on one node. A block is a range of devices that belongs to one
runtime: trainer workers take one, an engine or a reward model that wants devices of its own takes another.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from unirl.distributed.group.framework import ray_module
from unirl.types.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Place:
    """One device: a bundle of a placement group."""

    group: Any  # Any: ray.util.placement_group.PlacementGroup, and ray may be absent
    bundle: int


@dataclass(frozen=True)
class Block:
    """A range of a pool's devices."""

    pool: DevicePool
    name: str
    places: tuple[Place, ...]


class DevicePool:
    """Reserves `num_devices` devices of the cluster and hands out blocks of them.

    num_devices: GPUs with device="cuda", CPU cores with device="cpu" (`cpus_per_device` cores each, which may be
      less than one).
    devices_per_node: more devices than this span several nodes, which must be full.
    address: None joins the Ray that this process already uses, or starts one on this machine, which `close` stops;
      "auto" or host:port joins a running cluster.
    start_timeout_s: longest wait for the devices to become free.
    log_to_driver: whether what workers print appears here.

    Raises ConfigError before anything is started where the machine or the cluster has fewer devices.
    """

    def __init__(
        self,
        num_devices: int,
        device: Device = "cpu",
        *,
        devices_per_node: int = 8,
        cpus_per_device: float = 1.0,
        address: str | None = None,
        start_timeout_s: float = 120.0,
        log_to_driver: bool = True,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"cluster.device is {device!r}; choose cpu or cuda")
        if num_devices < 1 or devices_per_node < 1:
            raise ConfigError(
                f"num_devices = {num_devices} and devices_per_node = {devices_per_node} must be at least 1"
            )
        if num_devices > devices_per_node and num_devices % devices_per_node:
            raise ConfigError(
                f"num_devices = {num_devices} does not fill nodes of devices_per_node = {devices_per_node}. "
                "Change one of: cluster.num_devices, cluster.devices_per_node."
            )
        self.num_devices = num_devices
        self.device: Device = device
        self.num_nodes = max(1, num_devices // devices_per_node)
        self.is_closed = False
        self._ray = ray_module()
        self._blocks: dict[str, tuple[int, int]] = {}
        self._groups: list[Any] = []  # Any: placement groups
        self.cpus_per_device = cpus_per_device
        self._is_ray_ours = False
        self._join(address, log_to_driver)
        try:
            self._check(self._ray.cluster_resources(), "the Ray cluster")
            self._reserve(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _join(self, address: str | None, log_to_driver: bool) -> None:
        if self._ray.is_initialized():
            return
        begin = time.monotonic()
        if address is None:
            resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(torch.cuda.device_count())}
            self._check(resources, "this machine")
            self._ray.init(
                address="local",
                num_cpus=int(resources["CPU"]),
                num_gpus=int(resources["GPU"]),
                include_dashboard=False,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
        else:
            self._ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
        self._is_ray_ours = True
        logger.info("joined Ray at %s in %.1f s", address or "this machine", time.monotonic() - begin)

    def _check(self, resources: dict[str, float], where: str) -> None:
        cores = self.num_devices * self.cpus_per_device
        if self.device == "cuda" and resources.get("GPU", 0) < self.num_devices:
            raise ConfigError(
                f"cluster.num_devices asks for {self.num_devices} GPUs; {where} has {resources.get('GPU', 0):.0f}. "
                "Lower cluster.num_devices, or set cluster.device=cpu."
            )
        if resources.get("CPU", 0) < cores:
            raise ConfigError(
                f"cluster.num_devices = {self.num_devices} ({self.device}) needs {cores:g} CPU cores; "
                f"{where} has {resources.get('CPU', 0):.0f}. Lower cluster.num_devices."
            )

    def _reserve(self, timeout_s: float) -> None:
        per_node = self.num_devices // self.num_nodes
        bundle: dict[str, float] = {"CPU": self.cpus_per_device}
        if self.device == "cuda":
            bundle["GPU"] = 1
        create = self._ray.util.placement_group
        self._groups = [create([bundle] * per_node, strategy="STRICT_PACK") for _ in range(self.num_nodes)]
        deadline = time.monotonic() + timeout_s
        for node, group in enumerate(self._groups):
            if not group.wait(max(0.0, deadline - time.monotonic())):
                free = {name: amount for name, amount in self._ray.available_resources().items() if name in bundle}
                raise WorkerError(
                    "placement",
                    f"waited {timeout_s:.0f} s for {per_node} devices of {bundle} together on one node "
                    f"(node {node + 1} of {self.num_nodes}); the cluster has {free} free. "
                    "Stop the run that holds them, or lower cluster.num_devices or cluster.devices_per_node.",
                )

    def block(self, name: str, start: int = 0, stop: int | None = None) -> Block:
        """Devices start..stop-1 under a name. Raises ConfigError outside the pool or where blocks overlap."""
        stop = self.num_devices if stop is None else stop
        if not 0 <= start < stop <= self.num_devices:
            raise ConfigError(f"block {name} = [{start}, {stop}) lies outside the pool of {self.num_devices} devices")
        if name in self._blocks:
            raise ConfigError(f"two blocks are called {name!r}")
        for other, (first, last) in self._blocks.items():
            if start < last and first < stop:
                raise ConfigError(f"block {name} = [{start}, {stop}) overlaps block {other} = [{first}, {last})")
        self._blocks[name] = (start, stop)
        per_node = self.num_devices // self.num_nodes
        places = tuple(Place(self._groups[i // per_node], i % per_node) for i in range(start, stop))
        return Block(self, name, places)

    def free(self, block: Block) -> None:
        """Give a block's devices back to the pool."""
        self._blocks.pop(block.name, None)

    def close(self) -> None:
        """Give the devices back; stop Ray where this pool started it. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        if not self._ray.is_initialized():
            return
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        if self._is_ray_ours:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
