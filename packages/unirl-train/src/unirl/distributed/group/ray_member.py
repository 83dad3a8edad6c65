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
        """See Member; waits until it is built."""
        return self.runtime.pids[0]

    @property
    def name(self) -> str:
        """See Member."""
        return self.runtime.names[0] if self._loading.done() and not self._loading.exception() else self._name

    @property
    def is_alive(self) -> bool:
        """See Member. A death is known once a call has failed of it."""
        if not self._loading.done():
            return True
        return self._loading.exception() is None and not self._loading.result().is_closed

    def ready(self) -> Mapping[str, ComponentInfo]:
        """See Member."""
        return self.infos()

    def infos(self) -> Mapping[str, ComponentInfo]:
        """See WorkerMember."""
        return self.runtime.infos

    def remote_role(self, name: str) -> RemoteRole:
        """See WorkerMember."""
        return self.runtime.remote_role(name)

    def call(self, message: Ask | str) -> Any:  # Any: as the component's method
        """See Member."""
        if isinstance(message, str):
            return self.runtime.ask_worker(message)
        return self.runtime.ask(message)

    def post(self, message: Ask) -> None:
        """See Member; in the worker's lane of control, beside a call that runs."""
        self.runtime.post(message)

    def restart(self) -> None:
        """See Member."""
        self.stop()
        self._loading = self._started()

    def stop(self) -> None:
        """See Member."""
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
        """See Store."""
        return ray_module().put(outgoing(value))

    def get(self, stored: Any) -> RolloutResp:  # Any: Ray's reference
        """See Store."""
        return ray_module().get(stored)

    def rows(self, stored: Any, rows: Sequence[int]) -> StoredRows:  # Any: Ray's reference
        """See Store."""
        return StoredRows(((stored, tuple(rows)),))

    def joined(self, picked: Sequence[Any]) -> StoredRows:  # Any: Ray's references, or StoredRows of another pool
        """See Store."""
        pieces: list[tuple[Any, tuple[int, ...] | None]] = []
        for each in picked:
            pieces += each.pieces if isinstance(each, StoredRows) else [(each, None)]
        return StoredRows(tuple(pieces))
