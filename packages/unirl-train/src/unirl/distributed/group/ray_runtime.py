"""The runtime with one Ray actor per device.

Held values stay in the workers (`Held`), returned results travel through the object store (`tensor.transport`), and if
a worker fails or dies, the run stops with the worker's name and traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.distributed.busy_clock import BusyClock
from unirl.distributed.dispatch import HeldKey, shard_ranks
from unirl.distributed.group.device_pool import Block, DevicePool, reserved
from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.object_store import ObjectStore
from unirl.distributed.group.ray_worker import CONTROL, ProcessInfo, RayWorker
from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.group.waiting import CallFailed, answers
from unirl.distributed.held import Held
from unirl.distributed.pools.cutting import Ask
from unirl.distributed.pools.shelf import Shelf
from unirl.distributed.runtime import Runtime
from unirl.distributed.spans import Span, SpanLog
from unirl.distributed.tensor.planes.base import DataPlane, ObjectPlane
from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.worker import Builder, ComponentInfo
from unirl.types.device_kinds import CPU, DeviceName, kind_of
from unirl.types.errors import ConfigError, ContractError, WorkerError
from unirl.types.roles import MeshPlace
from unirl.types.rollout import RolloutResp

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 5.0
"""Time that `close` gives workers to close their components, and again to end by themselves, before they are killed."""

_GONE_TIMEOUT_S = 10.0
"""How long `close` waits for killed processes to disappear."""


class RayRuntime(Runtime):
    """Builds the same components on `num_devices` workers, one process each, and calls them.

    builder: runs in every worker; must pickle, and its module must be importable there.
    device: one core per worker on "cpu", with collectives over gloo; else one device per worker, with its own
        collectives.
    env: environment variables of the worker processes.
    timeout_s: longest time of one call, of building the components, and of one collective inside them.
    start_timeout_s: longest wait for devices and processes.
    address, num_nodes, cpus_per_device, log_to_driver: see `DevicePool`. A worker has one CPU thread per core reserved
        for it, and at least one.
    block: devices of a pool that several runtimes share; None makes a separate pool.
    plane: moves samples between workers, shared by all runtimes of a run; None uses Ray objects.

    Errors of workers keep their class if it is a `UniRLError` and become `WorkerError` otherwise; both name the worker.
    If all ranks still answered, the runtime stays usable; otherwise it is closed.
    Raises ConfigError if there are too few devices.
    """

    def __init__(
        self,
        builder: Builder,
        *,
        num_devices: int,
        device: DeviceName = CPU,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
        start_timeout_s: float = 300.0,
        address: str = "auto",
        num_nodes: int = 1,
        cpus_per_device: float = 1.0,
        log_to_driver: bool = True,
        block: Block | None = None,
        plane: DataPlane | None = None,
    ) -> None:
        super().__init__()
        begin = time.monotonic()
        self._plane = plane or ObjectPlane()
        self._ray = ray_module()
        self._timeout_s = timeout_s
        self._own_pool: DevicePool | None = None
        if block is None:
            self._own_pool = DevicePool(
                num_devices,
                device,
                num_nodes=num_nodes,
                cpus_per_device=cpus_per_device,
                address=address,
                start_timeout_s=start_timeout_s,
                log_to_driver=log_to_driver,
            )
            block = self._own_pool.block("worker")
        if len(block.places) != num_devices or block.pool.device != device:
            raise ConfigError(
                f"block {block.name} has {len(block.places)} {block.pool.device} devices; "
                f"the runtime asks for {num_devices} {device} devices"
            )
        self._world_size = num_devices
        self._block = block
        self._actors: list[Any] = []  # Any: ray actor handles
        self._processes: list[ProcessInfo] = []
        self._failure: str | None = None
        self.clock = BusyClock()
        self._spans = SpanLog()
        self._lane = f"pool/{block.name}"
        self._shelf = Shelf(ObjectStore())
        self._components: Mapping[str, ComponentInfo] = {}
        self._mesh: Sequence[MeshPlace] = ()
        atexit.register(self.close)
        with contextlib.ExitStack() as unfinished:
            unfinished.callback(self.close)
            self._start_processes(dict(env or {}), start_timeout_s)
            self._form_group(start_timeout_s)
            built = self._on_all("build", (builder,), "building the components", timeout_s)
            self._components = built[0][0]
            self._mesh = [place for _, place in built]
            shard_ranks(self._mesh)  # raises if the workers do not fit together
            self._plane.join(self._actors)
            unfinished.pop_all()
        logger.info("started %s in %.1f s", ", ".join(self._names()), time.monotonic() - begin)

    def gauges(self) -> dict[str, float]:
        """What the driver asked of these workers since the last call: `busy_s`."""
        return {"busy_s": self.clock.take()}

    def take_spans(self) -> list[Span]:
        """See Runtime: calls of components."""
        return self._spans.take()

    def _start_processes(self, env: dict[str, str], timeout_s: float) -> None:
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if self._block.pool.num_nodes == 1 else {}
        kind = kind_of(self._block.pool.device)
        device = f"{kind.name}:0" if kind.is_accelerator else kind.name
        self._plane.prepare()
        actor_class = self._ray.remote(concurrency_groups={CONTROL: 1}, **self._plane.actor_options)(RayWorker)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for rank, place in enumerate(self._block.places):
            options = actor_class.options(
                num_cpus=self._block.pool.cpus_per_device * place.fraction,
                **reserved(kind, place.fraction),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy(place.group, placement_group_bundle_index=place.bundle),
                runtime_env={"env_vars": self._thread_limits(place.fraction) | loopback | env},
            )
            self._actors.append(options.remote(rank, self._world_size, device, sys.path))
        self._processes = self._on_all("process_info", (), "starting the processes", timeout_s)

    def _num_threads(self, fraction: float) -> int:
        """Threads of a worker that has this fraction of a device."""
        return max(1, int(self._block.pool.cpus_per_device * fraction))

    def _thread_limits(self, fraction: float) -> dict[str, str]:
        # Set before the process imports anything, since other libraries than PyTorch read them once.
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._num_threads(fraction)))

    def _form_group(self, start_timeout_s: float) -> None:
        host = "127.0.0.1" if self._block.pool.num_nodes == 1 else self._processes[0].node
        store = self._actors[0].open_store.remote(host, start_timeout_s)
        (port,) = self._await({store: 0}, "opening the meeting point", start_timeout_s)
        num_threads = self._num_threads(self._block.places[0].fraction)
        self._on_all("join", (host, port, num_threads, self._timeout_s), "forming the process group", start_timeout_s)

    def remote_role(self, name: str) -> RemoteRole:
        """A component of these workers, callable from the workers of another runtime."""
        self._require_open()
        self.role(name)
        return RemoteRole(name, tuple(self._actors), tuple(self._names()), self._timeout_s)

    # A worker that is asked alone (`unirl.distributed.pools.served`), from any thread -----------------------------

    def ask(self, ask: Ask) -> Any:  # Any: as the component's method
        """The answer of the only worker: what the method gives, or with `is_stored` its metadata and a reference."""
        self._require_open()
        (actor,), what = self._actors, f"{ask.role}.{ask.method}"
        args, kwargs = outgoing(ask.args), outgoing(dict(ask.kwargs))
        with self.clock.call(), self._spans.span(self._lane, what):
            if not ask.is_stored:
                asked = actor.call_component.remote(ask.role, ask.method, *args, **kwargs)
                return self._await({asked: 0}, what, self._timeout_s)[0]
            meta, whole = actor.produce.options(num_returns=2).remote(ask.role, ask.method, args, kwargs)
            return self._await({meta: 0}, what, self._timeout_s)[0], whole

    def ask_worker(self, method: str) -> Any:  # Any: as the method of `Worker`
        """What a method of the only worker's `Worker` gives."""
        return self._invoke_all([(0, method, ())])[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    @property
    def names(self) -> list[str]:
        """The workers, as errors call them."""
        return self._names()

    @property
    def infos(self) -> Mapping[str, ComponentInfo]:
        """Role name -> what is known of its component."""
        return self._components

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self._components

    def _places(self) -> Sequence[MeshPlace]:
        return self._mesh

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return self._start(calls)()

    def _start(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> Callable[[], list[Any]]:
        self._require_open()
        _, method, args = calls[0]
        what = ".".join(args[:2]) if method == "invoke" else method
        pending = {self._actors[rank].perform.remote(method, outgoing(own)): rank for rank, method, own in calls}
        self.clock.begin()
        begin = time.monotonic()

        def finish() -> list[Any]:
            try:
                self._require_open()
                return self._await(pending, what, self._timeout_s)
            finally:
                self.clock.end()
                if method == "invoke":
                    self._spans.add(Span(self._lane, what, begin, time.monotonic()))

        return finish

    def _start_control(self, args: tuple[Any, ...]) -> Callable[[], list[Any]]:
        self._require_open()
        own = outgoing(args)
        pending = {
            actor.control.options(concurrency_group=CONTROL).remote(own): rank
            for rank, actor in enumerate(self._actors)
        }
        return lambda: self._await(pending, ".".join(args[:2]), self._timeout_s)

    def _pick(self, calls: list[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:
        self._require_open()
        picked = [(rank, *self._plane.pick(self._actors[rank], key, rows)) for rank, key, rows in calls]
        self._await({done: rank for rank, done, _ in picked if done is not None}, "pick", self._timeout_s)
        return [rows for _, _, rows in picked]

    def landed(self, held: Held) -> Held:
        """See Runtime: as objects of the driver, which other workers fetch while these ones work. Needs Ray's objects
        as the plane."""
        return self._shelf.landing(held)

    def read(self, paths: Sequence[Path]) -> Held:
        """See Runtime: as objects of the driver."""
        return self._shelf.read(HeldKey(next(self._numbers)), paths)

    def _assemble(self, calls: list[tuple[int, tuple[Any, ...], list[Any]]]) -> list[RolloutResp]:
        self._require_open()
        # Ray replaces references by their values only if they are direct arguments.
        pending = {self._actors[rank].assemble.remote(args, *arrived): rank for rank, args, arrived in calls}
        assembled = self._await(pending, "assemble", self._timeout_s)
        self._plane.taken()
        return assembled

    def _on_all(self, method: str, args: tuple[Any, ...], what: str, timeout_s: float) -> list[Any]:
        pending = {getattr(actor, method).remote(*args): rank for rank, actor in enumerate(self._actors)}
        return self._await(pending, what, timeout_s)

    def _await(self, pending: dict[Any, int], what: str, timeout_s: float) -> list[Any]:
        names = self._names()
        try:
            actors = dict(zip(names, self._actors, strict=True))
            return answers({reference: names[rank] for reference, rank in pending.items()}, what, timeout_s, actors)
        except CallFailed as failed:
            if not failed.is_settled:
                self._close_after(f"{failed.failures[0].worker} failed in {what}")
            failed.raise_cause()
        except WorkerError:
            self._close_after(f"{what} took longer than {timeout_s:.0f} s")
            raise

    def _names(self) -> list[str]:
        names = []
        for rank in range(self._world_size):
            where = f"rank {rank} of {self._world_size}"
            if self._processes:
                where += f", pid {self._processes[rank].pid}"
                if self._block.pool.num_nodes > 1:
                    where += f" on {self._processes[rank].node}"
            names.append(f"{self._block.name}-{rank} ({where})")
        return names

    def _require_open(self) -> None:
        if self.is_closed:
            raise ContractError(f"this runtime is closed: {self.failure}")

    @property
    def failure(self) -> str:
        """Why it is closed, if it is."""
        return self._failure or "close() was called"

    def _close_after(self, failure: str) -> None:
        self._failure = failure
        self.close()

    def close(self) -> None:
        """Kill the workers and all processes that they started, and release the devices. Safe to call twice.

        Returns when the processes on this machine are gone; Ray ends those on other machines.
        """
        if self.is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._ray.is_initialized():
            self._plane.leave(self._actors)
            if self._failure is None:
                # Ray kills a worker's child processes as soon as the worker ends.
                closing = [actor.close.remote() for actor in self._actors]
                self._ray.wait(closing, num_returns=len(closing), timeout=_LEAVE_TIMEOUT_S)
                # Ray prints a warning for a worker that is killed, but not for one that ends by itself.
                leaving = [actor.__ray_terminate__.remote() for actor in self._actors]
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_TIMEOUT_S)
            here = self._ray.util.get_node_ip_address()
            for actor in self._actors:
                self._ray.kill(actor, no_restart=True)
            _end_process_groups([process.pid for process in self._processes if process.node == here])
        self._block.pool.free(self._block)
        if self._own_pool is not None:
            self._own_pool.close()


def _end_process_groups(leaders: list[int]) -> None:
    """Kill the process groups of these leaders and wait until the leaders are gone."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    waiting = list(leaders)
    while waiting and time.monotonic() < deadline:
        waiting = [leader for leader in waiting if _is_alive(leader)]
        time.sleep(0.02)
    if waiting:
        logger.warning("processes %s are still there %.0f s after they were killed", waiting, _GONE_TIMEOUT_S)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
