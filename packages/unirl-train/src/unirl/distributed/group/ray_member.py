"""Members of a served pool as Ray workers, and Ray's object store as what keeps their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.pools.cutting import Ask
from unirl.distributed.spans import Span
from unirl.distributed.worker import ComponentInfo
from unirl.types.errors import UniRLError
from unirl.types.roles import Collect


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

    def take_spans(self) -> list[Span]:
        """See WorkerMember; none of one that is being replaced."""
        return self.runtime.take_spans() if self._loading.done() and self.is_alive else []

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
