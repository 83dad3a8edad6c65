"""The actor in a worker process: wraps a `Worker` and the process group of its runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from unirl.distributed.dispatch import HeldKey
from unirl.distributed.group.framework import ray_module
from unirl.distributed.tensor.transport import contiguous, outgoing
from unirl.distributed.worker import Builder, ComponentInfo, Openable, Worker, WorkerContext
from unirl.types.devices import collectives_of, is_accelerator, require_device
from unirl.types.heartbeat import Activity, Report
from unirl.types.roles import MeshPlace
from unirl.types.rollout import RolloutResp


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker process runs."""

    pid: int
    node: str
    """Address of its node."""


CONTROL = "control"
"""Ray's concurrency group of methods that are answered while a call runs: `RayWorker.report`."""


class RayWorker:
    """One rank in a separate process. Calls of `RayRuntime` run one at a time, always in the same thread; `report`
    answers meanwhile, in the concurrency group CONTROL."""

    def __init__(self, rank: int, world_size: int, device: str, import_path: list[str]) -> None:
        # The driver's import path: Ray passes on its script and working directories only.
        sys.path.extend(entry for entry in import_path if entry not in sys.path)
        self._context = WorkerContext(rank, world_size, device)
        self._store: torch.distributed.Store | None = None
        self._worker: Worker | None = None
        self._kept: dict[str, Any] = {}  # Any: see Openable
        self._activity = Activity()

    def report(self) -> Report:
        """What runs in the lane of work, since when and where."""
        return self._activity.report()

    def process_info(self) -> ProcessInfo:
        """Make this process the leader of its own process group, so that its children can be ended with it."""
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        return ProcessInfo(os.getpid(), ray_module().util.get_node_ip_address())

    def open_store(self, host: str, timeout_s: float) -> int:
        """On rank 0: open the store of the process group; returns its port, which the system chooses."""
        store = torch.distributed.TCPStore(
            host,
            0,
            self._context.world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self._store = store
        return store.port

    def join(self, host: str, port: int, num_threads: int, timeout_s: float) -> None:
        """On all ranks: form the process group (gloo, and on accelerators their own collectives too)."""
        torch.set_num_threads(num_threads)
        timeout = timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = torch.distributed.TCPStore(host, port, self._context.world_size, timeout=timeout)
        require_device(self._context.device)
        device = torch.device(self._context.device)
        if is_accelerator(device):
            torch.accelerator.set_device_index(device)
        torch.distributed.init_process_group(
            collectives_of(device),
            store=self._store,
            rank=self._context.rank,
            world_size=self._context.world_size,
            timeout=timeout,
            # With a device, NCCL connects now: lazy connections, in an order that differs by rank, can deadlock.
            device_id=device if is_accelerator(device) else None,
        )

    def build(self, builder: Builder) -> tuple[dict[str, ComponentInfo], MeshPlace]:
        """On all ranks: build the components; returns their descriptions and this worker's place in the mesh."""
        with self._activity.doing("build"):
            self._worker = Worker(builder, self._context)
        return self._worker.component_infos(), self._worker.mesh_place

    def close(self) -> None:
        """Close the components, so that they stop what they started."""
        if self._worker is not None:
            self._worker.close()

    def call_component(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:  # Any: as the methods
        """Call a component for a worker of another runtime (`RemoteRole`), or for a pool (`RayRuntime.ask`)."""
        return self.perform("invoke", (role, method, self._opened(args), self._opened_by_name(kwargs), None))

    def produce(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:  # Any: as the component's methods
        """Two results of Ray: the metadata of what a component gives, and the whole, which outlives this worker."""
        whole = self.perform("invoke", (role, method, self._opened(args), self._opened_by_name(kwargs), None))
        return whole.metadata_only(), whole

    def control(self, args: tuple[Any, ...]) -> Any:  # Any: as the component's methods
        """`Worker.invoke` in the lane CONTROL, while another call may run."""
        return outgoing(self._built.invoke(*args))

    def pick(self, key: HeldKey, rows: Sequence[int]) -> tuple[None, Any]:  # Any: held values are of any type
        """Two Ray results for workers that assemble a new value: None, a signal that the rows are ready, and the
        rows."""
        return None, self.perform("pick", (key, rows))

    def pick_contiguous(self, key: HeldKey, rows: Sequence[int]) -> Any:  # Any: as pick
        """Only the rows, contiguous as Ray Direct Transport needs them."""
        return contiguous(self.perform("pick", (key, rows)))

    def pick_elsewhere(
        self, key: HeldKey, rows: Sequence[int], put: Callable[[RolloutResp], Openable]
    ) -> tuple[None, Openable]:
        """`pick`, but with the rows stored by `put`. `put` must pickle."""
        return None, put(self.perform("pick", (key, rows)))

    def assemble(self, args: tuple[Any, ...], *arrived: RolloutResp | Openable) -> RolloutResp:
        """`Worker.assemble`. Rows of other workers are direct arguments, so that Ray fetches them."""
        return self.perform("assemble", (*args, self._opened(arrived)))

    def _opened(self, values: tuple[Any, ...]) -> tuple[Any, ...]:  # Any: as call_component and assemble
        return tuple(value.opened(self._kept) if isinstance(value, Openable) else value for value in values)

    def _opened_by_name(self, values: dict[str, Any]) -> dict[str, Any]:  # Any: as call_component
        return dict(zip(values, self._opened(tuple(values.values())), strict=True))

    def perform(self, method: str, args: tuple[Any, ...]) -> Any:  # Any: as the worker's methods
        """Call a method of `Worker`; tensors in its result are moved to the CPU."""
        with self._activity.doing(".".join(args[:2]) if method == "invoke" else method):
            return outgoing(getattr(self._built, method)(*args))

    @property
    def _built(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("build comes before any call")
        return self._worker
