"""Members of a served pool as Ray workers, and Ray's object store as what keeps their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.pools.served import Ask
from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.worker import ComponentInfo, Openable
from unirl.types.errors import UniRLError
from unirl.types.roles import Collect
from unirl.types.rollout import RolloutResp


class RayMember:
    """A worker on one device, built while the caller does something else. Implements WorkerMember.

    start: builds the worker; called again for one that replaces a dead one.
    """

    def __init__(self, name: str, start: Callable[[], RayRuntime]) -> None:
        self._name = name
        self._start = start
        self._loading = self._started()

    @property
    def runtime(self) -> RayRuntime:
        """The worker as a runtime; waits until it is built. Raises what building it raises."""
        return self._loading.result()

    @property
    def pid(self) -> int:
        """Id of its process; waits until it is built."""
        return self.runtime.pids[0]

    @property
    def name(self) -> str:
        return self.runtime.names[0] if self._loading.done() and not self._loading.exception() else self._name

    @property
    def is_alive(self) -> bool:
        """True unless it ended; a death is known once a call has failed of it."""
        if not self._loading.done():
            return True
        return self._loading.exception() is None and not self._loading.result().is_closed

    @property
    def death(self) -> str:
        return str(self._loading.exception() or self._loading.result().failure)

    def ready(self) -> Mapping[str, ComponentInfo]:
        return self.infos()

    def infos(self) -> Mapping[str, ComponentInfo]:
        return self.runtime.infos

    def take_busy_s(self) -> float:
        """See WorkerMember; 0 for one that is being replaced."""
        return self.runtime.clock.take() if self._loading.done() and self.is_alive else 0.0

    def remote_role(self, name: str) -> RemoteRole:
        return self.runtime.remote_role(name)

    def call(self, message: Ask | str) -> Any:  # Any: as the component's method
        if isinstance(message, str):
            return self.runtime.ask_worker(message)
        return self.runtime.ask(message)

    def post(self, message: Ask) -> None:
        """Call a component in the worker's lane of control, while another call may run."""
        self.runtime.control(message.role, message.method, Collect.ALL, message.args, message.kwargs)

    def restart(self) -> None:
        self.stop()
        self._loading = self._started()

    def stop(self) -> None:
        if self._loading.exception() is None:
            self._loading.result().close()

    def _started(self) -> Future[RayRuntime]:
        loading: Future[RayRuntime] = Future()

        def load() -> None:
            try:
                loading.set_result(self._start())
            except UniRLError as error:
                loading.set_exception(error)
            except BaseException as error:
                loading.set_exception(error)
                raise

        Thread(target=load, name=f"start {self._name}", daemon=True).start()
        return loading


@dataclass(frozen=True)
class StoredRows:
    """Samples in Ray's object store, which a worker fetches from there. Implements Openable."""

    pieces: tuple[tuple[Any, tuple[int, ...] | None], ...]  # Any: Ray's references
    """Reference of a response, and which of its samples; None: all."""

    def opened(self, kept: dict[str, Any]) -> RolloutResp:  # Any: see Openable
        """The samples in this process."""
        found = ray_module().get([reference for reference, _ in self.pieces])
        values = [value.opened(kept) if isinstance(value, Openable) else value for value in found]
        parts = [
            value if rows is None else value.select(rows) for value, (_, rows) in zip(values, self.pieces, strict=True)
        ]
        return parts[0] if len(parts) == 1 else RolloutResp.concat([outgoing(part) for part in parts])


class ObjectStore:
    """What members made, as objects of the driver: they outlive the worker that made them. Implements Store."""

    def put(self, value: RolloutResp) -> Any:  # Any: Ray's reference
        return ray_module().put(outgoing(value))

    def get(self, stored: Any) -> RolloutResp:  # Any: Ray's reference
        return ray_module().get(stored)

    def rows(self, stored: Any, rows: Sequence[int]) -> StoredRows:  # Any: Ray's reference
        return StoredRows(((stored, tuple(rows)),))

    def joined(self, picked: Sequence[Any]) -> StoredRows:  # Any: Ray's references, or StoredRows of another pool
        pieces: list[tuple[Any, tuple[int, ...] | None]] = []
        for each in picked:
            pieces += each.pieces if isinstance(each, StoredRows) else [(each, None)]
        return StoredRows(tuple(pieces))
