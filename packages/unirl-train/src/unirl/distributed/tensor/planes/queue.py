"""TransferQueue: rows go through its storage units, on any node and of any backend that it supports."""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from unirl.distributed.dispatch import HeldKey
from unirl.distributed.group.framework import ray_module
from unirl.distributed.tensor.flat import FlatLayout
from unirl.distributed.tensor.planes.base import DataPlane
from unirl.types.errors import ConfigError, WorkerError
from unirl.types.rollout import RolloutResp
from unirl.types.storage import flatten_response, rebuild_response

ResultT = TypeVar("ResultT")

_PARTITION, _FIELD = "unirl", "rows"
_PROCESS_CPUS = 1
"""CPUs that TransferQueue reserves for its controller and for each storage unit."""

_CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class QueuedRows:
    """Rows whose tensors are one entry in the queue. Implements unirl.distributed.worker.Openable."""

    key: str
    structure: str
    layout: FlatLayout
    timeout_s: float

    @classmethod
    def put(cls, rows: RolloutResp, key: str, timeout_s: float) -> QueuedRows:
        """Put rows into the queue, in the worker that holds them. Raises what `flatten_response` raises."""
        structure, tensors = flatten_response(rows)
        layout = FlatLayout.of(tensors)
        if layout.num_bytes:
            buffer = torch.empty(1, layout.num_bytes, dtype=torch.uint8)
            layout.write(tensors, buffer[0])
            fields = _tensordict()({_FIELD: buffer}, batch_size=1)
            _within(
                timeout_s,
                f"putting {layout.num_bytes} bytes",
                lambda: _client().kv_batch_put([key], _PARTITION, fields),
            )
        return cls(key, structure, layout, timeout_s)

    def opened(self, kept: dict[str, Any]) -> RolloutResp:
        """See Openable. Raises WorkerError if the queue does not answer in time."""
        buffer = torch.empty(0, dtype=torch.uint8)
        if self.layout.num_bytes:
            what = f"getting {self.layout.num_bytes} bytes"
            found = _within(self.timeout_s, what, lambda: _client().kv_batch_get([self.key], _PARTITION, [_FIELD]))
            if _FIELD not in found.keys():  # noqa: SIM118 - not a mapping
                raise WorkerError("TransferQueue", f"the rows of {self.key} are gone")
            (buffer,) = found[_FIELD].unbind()  # every tensor comes back nested
        return rebuild_response(
            self.structure, {name: view.clone() for name, view in self.layout.views(buffer).items()}
        )


class QueuePlane(DataPlane):
    """Starts TransferQueue for a run, and stops it with the last group of workers.

    options: changes to TransferQueue's default configuration, such as {backend: {storage_backend: MooncakeStore}}.
    timeout_s: of one put or get; a dead storage unit never answers.
    Raises ConfigError if the package is missing, or the cluster has no cores for its processes.
    """

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._members: list[Any] = []  # Any: ray actor handles
        self._queued: list[str] = []

    def join(self, actors: Sequence[Any]) -> None:
        if not self._members:
            self._start()
        self._members.extend(actors)

    def leave(self, actors: Sequence[Any]) -> None:
        was_open = bool(self._members)
        self._members = [member for member in self._members if member not in actors]
        if was_open and not self._members:
            with contextlib.suppress(WorkerError):  # Ray ends its processes with those of the run
                _within(_CLOSE_TIMEOUT_S, "its end", lambda: _queue().close())

    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        name = uuid.uuid4().hex
        self._queued.append(name)
        put = functools.partial(QueuedRows.put, key=name, timeout_s=self._timeout_s)
        done, picked = actor.pick_elsewhere.options(num_returns=2).remote(key, rows, put)
        return done, picked

    def taken(self) -> None:
        present = _within(self._timeout_s, "listing entries", lambda: _queue().kv_list(_PARTITION))
        names = [name for name in self._queued if name in present.get(_PARTITION, {})]
        if names:
            _within(self._timeout_s, "clearing entries", lambda: _queue().kv_clear(names, _PARTITION))
        self._queued.clear()

    def _start(self) -> None:
        queue = _queue()
        backend = self._options.get("backend", {})
        num_units = backend.get("SimpleStorage", {}).get("num_data_storage_units", 2)
        cores = _PROCESS_CPUS * (
            1 + (num_units if backend.get("storage_backend", "SimpleStorage") == "SimpleStorage" else 0)
        )
        free = ray_module().available_resources().get("CPU", 0.0)
        if free < cores:
            raise ConfigError(
                f"cluster.transport: transfer_queue starts {cores} processes with a core each besides the workers, but "
                f"{free:g} cores are free. Lower num_devices or cluster.cpus_per_device, or join a larger cluster."
            )
        _within(self._timeout_s, "its start", lambda: queue.init(dict(self._options)))


def _queue() -> Any:  # Any: transfer_queue is optional
    try:
        import transfer_queue
    except ImportError as error:
        raise ConfigError(
            f"cluster.transport: transfer_queue needs TransferQueue, which cannot be imported ({error}). "
            "Install it with `pip install 'unirl-train[transfer-queue]'`, or choose another transport."
        ) from error
    return transfer_queue


def _client() -> Any:  # Any: as _queue
    queue = _queue()
    queue.init()  # attaches this process to the running queue
    return queue


def _tensordict() -> Any:  # Any: comes with TransferQueue
    from tensordict import TensorDict

    return TensorDict


def _within(timeout_s: float, what: str, function: Callable[[], ResultT]) -> ResultT:
    """Run function() in a thread. Raises WorkerError if it does not return in time."""
    results: list[ResultT] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise WorkerError("TransferQueue", f"{what} failed: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    if not results:
        raise WorkerError(
            "TransferQueue", f"{what} took longer than {timeout_s:.0f} s; a storage unit may be gone, and rows with it"
        )
    return results[0]
