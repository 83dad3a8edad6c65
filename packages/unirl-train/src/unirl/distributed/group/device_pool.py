"""The devices of a run as Ray placement groups, and named blocks of them.

One placement group per node keeps neighbouring ranks on one node. A block is a set of devices that belongs to one
runtime: trainer workers take one, and an engine or reward model on separate devices takes another.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from unirl.distributed.group.framework import ray_module
from unirl.types.device_kinds import CPU, DeviceKind, DeviceName, kind_of, lacks
from unirl.types.devices import accelerator
from unirl.types.devices import num_devices as devices_seen
from unirl.types.errors import ConfigError, WorkerError, as_sentence

logger = logging.getLogger(__name__)

ON_THIS_MACHINE = ("auto", "local")
"""Addresses that stand for a Ray on this machine."""

_CONNECT_TIMEOUT_S = 10.0
"""Time limit for a cluster to accept a connection; Ray itself tries for minutes."""

_POLL_S = 0.5


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group: one device, or a fraction of it if several blocks take turns on the device."""

    group: Any  # Any: ray.util.placement_group.PlacementGroup, and ray may be absent
    bundle: int
    fraction: float
    """1 / (number of blocks that share the device)."""


@dataclass(frozen=True)
class Block:
    """Some of a pool's devices."""

    pool: DevicePool
    name: str
    places: tuple[Place, ...]


class DevicePool:
    """Reserves `num_devices` devices of the cluster and hands out blocks of them.

    num_devices: CPU cores with device="cpu" (`cpus_per_device` cores each, which may be less than one), else
      accelerators.
    num_nodes: number of nodes with equally many devices each; with several, waits until the nodes have joined. address:
    "auto" or "local" joins the Ray that this process already uses, or starts one on this machine, which `close` stops;
    host:port joins a running cluster.
    start_timeout_s: longest wait for the nodes and for their devices to become free.
    log_to_driver: print the workers' output in this process.

    Raises ConfigError before anything is started, if the machine or cluster has too few devices or no cluster answers
    at the address.
    """

    def __init__(
        self,
        num_devices: int,
        device: DeviceName = CPU,
        *,
        num_nodes: int = 1,
        cpus_per_device: float = 1.0,
        address: str = "auto",
        start_timeout_s: float = 120.0,
        log_to_driver: bool = True,
    ) -> None:
        kind = kind_of(device)
        if not kind.has_many:
            raise ConfigError(lacks(device, "Ray resource", "Set runtime: local, or another device."))
        if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
            raise ConfigError(
                f"num_devices = {num_devices} and cluster.num_nodes = {num_nodes} must be at least 1, and devices must "
                "divide over nodes. Change one of them."
            )
        self.num_devices = num_devices
        self.device: DeviceName = device
        self._kind = kind
        self.num_nodes = num_nodes
        self.cpus_per_device = cpus_per_device
        self.is_closed = False
        self._ray = ray_module()
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._groups: list[Any] = []  # Any: placement groups
        self._is_ray_ours = False
        deadline = time.monotonic() + start_timeout_s
        self._join(address, log_to_driver)
        try:
            self._reserve(self._nodes(deadline, start_timeout_s), deadline, start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _join(self, address: str, log_to_driver: bool) -> None:
        if self._ray.is_initialized():
            self._require_joined(address)
            return
        begin = time.monotonic()
        if address in ON_THIS_MACHINE:
            num_cpus, here = len(os.sched_getaffinity(0)), accelerator()
            offered = {} if here is None else reserved(here, devices_seen(here.name))
            self._check({"CPU": float(num_cpus), **_by_name(offered)}, "this machine")
            self._ray.init(
                address="local",
                num_cpus=num_cpus,
                **{"num_gpus": 0, **offered},
                include_dashboard=False,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
        else:
            require_answer(address, _CONNECT_TIMEOUT_S)
            try:
                self._ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"cannot join the Ray cluster at {address}: {as_sentence(error)} {_ADDRESS_ADVICE}"
                ) from error
        self._is_ray_ours = True
        logger.info("joined Ray at %s in %.1f s", address, time.monotonic() - begin)

    def _require_joined(self, address: str) -> None:
        """Raise ConfigError if this process already uses another Ray than the one at the address."""
        if address in ON_THIS_MACHINE:
            return
        require_answer(address, _CONNECT_TIMEOUT_S)
        joined = self._ray.get_runtime_context().gcs_address
        if joined not in [f"{host}:{port}" for host, port in _sockets(address)]:
            raise ConfigError(
                f"cluster.address = {address!r} cannot be joined: this process already uses the Ray at {joined}. "
                "Set cluster.address to that one or to auto."
            )

    def _check(self, resources: Mapping[str, float], where: str) -> None:
        cores = self.num_devices * self.cpus_per_device
        name = self._kind.ray_resource
        if name is not None and resources.get(name, 0) < self.num_devices:
            raise ConfigError(
                f"num_devices asks for {self.num_devices} {name}s; {where} has {resources.get(name, 0):.0f}. "
                f"{_FEWER_OR_MORE}, or set device: cpu."
            )
        if resources.get("CPU", 0) < cores:
            raise ConfigError(
                f"num_devices = {self.num_devices} ({self.device}) needs {cores:g} CPU cores; "
                f"{where} has {resources.get('CPU', 0):.0f}. {_FEWER_OR_MORE}, or lower cluster.cpus_per_device."
            )

    def _bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus_per_device, **_by_name(reserved(self._kind, 1.0))}

    def _nodes(self, deadline: float, timeout_s: float) -> list[Any]:
        """The nodes to use: with several, this node first and the others by address; [None] for a single node, which
        Ray picks. Waits for nodes to join."""
        if self.num_nodes == 1:
            self._check(self._ray.cluster_resources(), "the Ray cluster")
            return [None]
        per_node = self.num_devices // self.num_nodes
        here = self._ray.get_runtime_context().get_node_id()
        while True:
            nodes = sorted(
                (node for node in self._ray.nodes() if node["Alive"]),
                key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]),
            )
            large = [node for node in nodes if self._capacity(node) >= per_node]
            if len(large) >= self.num_nodes:
                return large[: self.num_nodes]
            if time.monotonic() > deadline:
                has = ", ".join(f"{node['NodeManagerAddress']} with {self._capacity(node)}" for node in nodes)
                raise ConfigError(
                    f"cluster.num_nodes = {self.num_nodes} nodes of {per_node} {self.device} devices did not join "
                    f"within cluster.start_timeout_s = {timeout_s:.0f} s; there are {has}. Start Ray on the missing "
                    "nodes, or lower num_devices and cluster.num_nodes."
                )
            time.sleep(_POLL_S)

    def _capacity(self, node: Mapping[str, Any]) -> int:  # Any: Ray's description of a node
        return min(int(node["Resources"].get(name, 0) / amount + 1e-6) for name, amount in self._bundle().items())

    def _reserve(self, nodes: Sequence[Any], deadline: float, timeout_s: float) -> None:
        per_node = self.num_devices // self.num_nodes
        bundle = self._bundle()
        for node in nodes:
            bundles = [bundle] * per_node
            pinned = {} if node is None else {"bundle_label_selector": [{"ray.io/node-id": node["NodeID"]}] * per_node}
            self._groups.append(self._ray.util.placement_group(bundles, strategy="STRICT_PACK", **pinned))
        for number, (node, group) in enumerate(zip(nodes, self._groups, strict=True)):
            while not group.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
                if node is not None and node["NodeID"] not in alive:
                    raise WorkerError(
                        "placement",
                        f"node {node['NodeManagerAddress']} ({number + 1} of {self.num_nodes}) died before its devices "
                        "were reserved. Start Ray there again, or lower num_devices and cluster.num_nodes.",
                    )
                if time.monotonic() > deadline:
                    free = {name: amount for name, amount in self._ray.available_resources().items() if name in bundle}
                    raise WorkerError(
                        "placement",
                        f"waited {timeout_s:.0f} s for {per_node} devices of {bundle} together on one node "
                        f"(node {number + 1} of {self.num_nodes}); the cluster has {free} free. "
                        "Stop the run that holds them, or lower num_devices or cluster.devices_per_node.",
                    )

    def node_ids(self) -> list[str]:
        """Ray's ids of the nodes with these devices, in the order of their numbers."""
        table = self._ray.util.placement_group_table
        return [table(group)["bundles_to_node_id"][0] for group in self._groups]

    def block(self, name: str, start: int = 0, stop: int | None = None) -> Block:
        """Devices start..stop-1 under a name. Raises ConfigError if they are outside the pool or overlap another
        block."""
        return self.blocks({name: range(start, self.num_devices if stop is None else stop)})[name]

    def blocks(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, Block]:
        """Several blocks by name. If two of them share a device, their workers must take turns on it.

        Raises ConfigError if devices are outside the pool, a name is taken, or a block overlaps one from an earlier
        call.
        """
        for name, devices in wanted.items():
            if not devices or min(devices) < 0 or max(devices) >= self.num_devices:
                raise ConfigError(
                    f"block {name} = {list(devices)} must name devices of the pool, which has {self.num_devices}"
                )
            if name in self._blocks:
                raise ConfigError(f"two blocks are called {name!r}")
            for other, taken in self._blocks.items():
                if set(devices) & set(taken):
                    raise ConfigError(f"block {name} = {list(devices)} overlaps block {other} = {list(taken)}")
        holders = collections.Counter(device for devices in wanted.values() for device in devices)
        per_node = self.num_devices // self.num_nodes
        made = {}
        for name, devices in wanted.items():
            self._blocks[name] = tuple(devices)
            places = tuple(Place(self._groups[i // per_node], i % per_node, 1 / holders[i]) for i in devices)
            made[name] = Block(self, name, places)
        return made

    def free(self, block: Block) -> None:
        """Return a block's devices to the pool."""
        self._blocks.pop(block.name, None)

    def close(self) -> None:
        """Release the devices, and stop Ray if this pool started it. Safe to call twice."""
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


def reserved(kind: DeviceKind, amount: float) -> dict[str, Any]:  # Any: as Ray's options
    """Ray's options for this many devices of a kind, of a worker or of a node; none for a CPU."""
    if kind.ray_resource is None:
        return {}
    return {"num_gpus": amount} if kind.ray_resource == _GPU else {"resources": {kind.ray_resource: amount}}


def _by_name(options: Mapping[str, Any]) -> dict[str, float]:  # Any: as `reserved`
    """The resources of `reserved`, by Ray's names."""
    return {_GPU: options["num_gpus"]} if "num_gpus" in options else dict(options.get("resources", {}))


_GPU = "GPU"
_FEWER_OR_MORE = "Lower num_devices, join a larger cluster (cluster.address)"
_ADDRESS_ADVICE = "Start Ray there (ray start --head), or set cluster.address, or RAY_ADDRESS, to one that runs."


def require_answer(address: str, timeout_s: float) -> None:
    """Raise ConfigError if no connection is accepted at host:port within `timeout_s`."""
    for host, port in _sockets(address):
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError as error:
            raise ConfigError(
                f"no Ray answers at {host}:{port} (cluster.address, or RAY_ADDRESS) within {timeout_s:.0f} s: "
                f"{as_sentence(error)} {_ADDRESS_ADVICE}"
            ) from error


def _sockets(address: str) -> list[tuple[str, int]]:
    """The hosts and ports that a Ray address may resolve to: for this machine also the address that Ray uses
    instead."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address = {address!r} must be auto, local or host:port of a running Ray.")
    hosts = [host.strip("[]")]
    if hosts[0] in ("localhost", "127.0.0.1", "::1"):
        hosts.append(ray_module().util.get_node_ip_address())
    return [(each, int(port)) for each in hosts]
