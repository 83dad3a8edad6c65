"""A member of a pool of environments: processes that play the episodes of whoever asks.

What is sent and answered stays pickled here, so a member imports nothing of an environment. It knows no episode but by
name: who asks restores those whose process has ended (`unirl.rollout.environments.pooled`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from unirl.rollout.environments import wire
from unirl.rollout.environments.child import PlayingProcess, Prototype
from unirl.rollout.environments.process import Close
from unirl.types.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

FORGET_S = 3600.0
"""Time after which episodes of a client that says nothing are forgotten: its process may have died."""


@dataclass(frozen=True)
class SlotState:
    """One process of a member."""

    life: int
    """Processes that the slot has had before."""
    num_episodes: int
    pid: int


@dataclass(frozen=True)
class Batch:
    """Calls to one process, which it answers in order."""

    client: str
    """Who asks."""
    slot: int
    life: int
    """That of the process which the episodes are in; another one does not know them."""
    calls: bytes
    """A pickled list."""
    num_calls: int
    timeout_s: float
    """Longest time of one call, from when the process begins it."""
    begun: tuple[str, ...] = ()
    """Episodes that begin."""
    ended: tuple[str, ...] = ()
    """Episodes that are over."""


@dataclass(frozen=True)
class BatchResult:
    """What came of a batch."""

    answers: tuple[bytes, ...]
    """Pickled."""
    life: int
    """That of the present process."""
    death: str | None = None
    """How the process of the episodes ended, so that there are not all answers."""
    is_cause: bool = False
    """True if it ended in the call that is not answered."""


@dataclass(frozen=True)
class _Asked:
    batch: Batch
    result: Future[BatchResult]


class _Slot:
    """A process and the thread that asks it, in the order in which batches come."""

    def __init__(self, prototype: Prototype) -> None:
        self._prototype = prototype
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._episodes: dict[str, set[str]] = {}
        """Client -> those that have begun."""
        self._heard: dict[str, float] = {}
        """Client -> when it asked last."""
        self._forgotten: set[str] = set()
        """Clients whose episodes are gone, which they do not know yet."""
        self._death = ""
        self._is_closed = False
        self._changing = threading.Lock()
        """Guards the process against `close`."""
        self.life = 0
        self.busy_s = 0.0
        self._process = PlayingProcess(prototype)
        self._thread = threading.Thread(target=self._serve, name="unirl-environment-slot", daemon=True)

    def require_ready(self) -> None:
        """Wait until the process can play. Raises ConfigError if it cannot."""
        self._process.require_ready()
        self._thread.start()

    @property
    def state(self) -> SlotState:
        return SlotState(self.life, sum(map(len, list(self._episodes.values()))), self._process.pid)

    def submit(self, batch: Batch) -> Future[BatchResult]:
        """Ask the process once those before are answered. The future raises WorkerError once this is closed."""
        result: Future[BatchResult] = Future()
        with self._changing:
            if self._is_closed:
                result.set_exception(_closed())
            else:
                self._asked.put(_Asked(batch, result))
        return result

    def forget_silent(self) -> None:
        """End the episodes of clients that have asked nothing for long."""
        for client, heard in list(self._heard.items()):
            names = tuple(self._episodes.get(client, ()))
            if names and time.monotonic() - heard > FORGET_S:
                calls = wire.packed([Close(name) for name in names])
                self._forgotten.add(client)
                self.submit(Batch("", 0, self.life, calls, len(names), FORGET_S, ended=names))

    def close(self) -> None:
        """Kill the process. Safe to call twice."""
        with self._changing:
            self._is_closed = True
            self._process.kill()
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            began = time.monotonic()
            try:
                result = self._played(asked.batch)
            except (ConfigError, WorkerError) as error:
                asked.result.set_exception(error)
            else:
                asked.result.set_result(result)
            self.busy_s += time.monotonic() - began

    def _played(self, batch: Batch) -> BatchResult:
        """Raises ConfigError if no process can replace one that ends, WorkerError once this is closed."""
        if batch.life != self.life:
            return BatchResult((), self.life, self._death)
        if batch.client in self._forgotten:
            self._forgotten.discard(batch.client)
            return BatchResult((), self.life, f"forgot a client that was silent for {FORGET_S:.0f} s")
        self._heard[batch.client] = time.monotonic()
        if self._process.has_ended:
            return self._replaced([], self._process.death(), is_cause=False)
        answers: list[bytes] = []
        connection = self._process.connection
        try:
            connection.send_bytes(batch.calls)
            for _ in range(batch.num_calls):
                if not connection.poll(batch.timeout_s):
                    return self._replaced(answers, f"gave no answer within {batch.timeout_s:g} s")
                answers.append(connection.recv_bytes())
        except (EOFError, OSError):
            return self._replaced(answers, self._process.death())
        for name in (*batch.begun, *batch.ended):
            own = self._episodes.setdefault(client_of(name), set())
            (own.add if name in batch.begun else own.discard)(name)
        return BatchResult(tuple(answers), self.life)

    def _replaced(self, answers: Sequence[bytes], why: str, *, is_cause: bool = True) -> BatchResult:
        with self._changing:
            if self._is_closed:
                raise _closed()
            logger.warning("environments (pid %d) %s; the process is replaced", self._process.pid, why)
            self._process.kill()
            self._process = PlayingProcess(self._prototype)
        self._process.require_ready()
        self._episodes.clear()
        self.life += 1
        self._death = why
        return BatchResult(tuple(answers), self.life, why, is_cause)


class PoolMember:
    """Processes of one environment, which start when someone first asks. All methods give futures and may be called
    from several threads.

    num_processes: how many.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._slots: list[_Slot] = []
        self._at = ""
        self._is_closed = False
        self._changing = ThreadPoolExecutor(1, "unirl-environment-member")
        """Starts and stops processes, one request after the other."""

    def prepare(self, at: str, prototype: Prototype | None) -> Future[list[SlotState] | None]:
        """The processes as they are, started if they are not. None: none runs, and the prototype is needed first.

        at: where the environment stands in the recipe; a member plays one. The future raises ConfigError if the
        environment cannot be loaded here, or another one is played here.
        """
        return self._changing.submit(self._prepared, at, prototype)

    def _prepared(self, at: str, prototype: Prototype | None) -> list[SlotState] | None:
        if self._is_closed:
            raise _closed()
        if not self._slots:
            if prototype is None:
                return None
            self._slots, self._at = self._started(prototype), at
        if at != self._at:
            raise ConfigError(f"{at}.pool: the pool plays {self._at}, and only that. Give each environment its own.")
        for slot in self._slots:
            slot.forget_silent()
        return [slot.state for slot in self._slots]

    def _started(self, prototype: Prototype) -> list[_Slot]:
        slots: list[_Slot] = []
        try:
            for _ in range(self._num_processes):
                slots.append(_Slot(prototype))  # they load at the same time
            for slot in slots:
                slot.require_ready()
        except ConfigError:
            for slot in slots:
                slot.close()
            raise
        return slots

    def play(self, batches: Sequence[Batch]) -> Future[list[BatchResult]]:
        """Ask several processes at once, one batch each; their results in order."""
        return _gathered([self._slots[batch.slot].submit(batch) for batch in batches])

    def gauges(self) -> Future[dict[str, float]]:
        """Seconds in which a process had something to do since the last call, on average (`busy_s`), and processes that
        replaced others so far."""
        found: Future[dict[str, float]] = Future()
        busy_s = sum(slot.busy_s for slot in self._slots) / self._num_processes
        for slot in self._slots:
            slot.busy_s = 0.0
        found.set_result({"busy_s": busy_s, "process_restarts": float(sum(slot.life for slot in self._slots))})
        return found

    def close(self) -> Future[None]:
        """Kill the processes. Safe to call twice."""
        return self._changing.submit(self._close)

    def _close(self) -> None:
        self._is_closed = True
        for slot in self._slots:
            slot.close()


def full_name(client: str, episode: str) -> str:
    """An episode's name where those of other clients are too."""
    return f"{client}:{episode}"


def client_of(name: str) -> str:
    """Whose episode it is."""
    return name.partition(":")[0]


def _closed() -> WorkerError:
    return WorkerError("a member of a pool of environments", "it has left the pool")


def _gathered(futures: Sequence[Future[BatchResult]]) -> Future[list[BatchResult]]:
    """The results of all, once all are there; the first exception among them instead, if there is one."""
    whole: Future[list[BatchResult]] = Future()
    left, changing = len(futures), threading.Lock()

    def done(_: Future[BatchResult]) -> None:
        nonlocal left
        with changing:
            left -= 1
            if left:
                return
        error = next((error for future in futures if (error := future.exception()) is not None), None)
        if error is None:
            whole.set_result([future.result() for future in futures])
        else:
            whole.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    if not futures:
        whole.set_result([])
    return whole
