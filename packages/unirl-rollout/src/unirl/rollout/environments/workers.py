"""Processes that play episodes: calls have deadlines, and what dies or hangs is replaced without losing the others."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment, Task
from unirl.rollout.environments.process import Act, Answer, Answered, Call, Close, Raised, Reset, Restore
from unirl.rollout.environments.programs import end_programs, marking, new_mark
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_LOSSES = 2
"""Processes that one call may end before its episode is given up."""
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Lost:
    """Why an episode cannot go on."""

    reason: str


@dataclass
class _Episode:
    """What is needed to begin an episode again elsewhere."""

    task: Task
    seed: int
    actions: list[Any] = field(default_factory=list)  # Any: as the environment takes them
    state: Any = None  # Any: of the class's own
    digest: bytes = b""
    """Digest of the last answer; empty before the first."""
    lost: str | None = None
    """Why it cannot go on."""


class _Process:
    """One process."""

    def __init__(self, prototype: Environment[Any, Any], memory_bytes: int | None) -> None:  # Any: of whatever acts
        self._owner, theirs = Pipe()
        life, self._life = os.pipe()
        self._mark = new_mark() if prototype.starts_programs else None
        marked = [] if self._mark is None else marking(self._mark)
        command = [*marked, prototype.python or sys.executable, "-m", "unirl.rollout.environments.process"]
        self._child = subprocess.Popen(
            [*command, str(theirs.fileno()), str(life), self._mark or ""],
            pass_fds=[theirs.fileno(), life],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the trainer alone
        )
        theirs.close()
        os.close(life)
        # Another interpreter has its own libraries, which ours would hide.
        places = [] if prototype.python else [place or str(Path.cwd()) for place in sys.path]
        wire.send(self._owner, places)
        wire.send(self._owner, (prototype, memory_bytes))
        self.pid = self._child.pid

    @property
    def connection(self) -> Connection:
        """Becomes readable with each answer, and when the process dies."""
        return self._owner

    def send(self, calls: Sequence[Call]) -> None:
        """Raises OSError if the process is dead."""
        wire.send(self._owner, list(calls))

    def answer(self) -> Answered | Raised:
        """The next answer. Raises EOFError or OSError if the process is dead."""
        return wire.receive(self._owner)

    def death(self) -> str:
        code = self._child.wait()
        return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """Kill it and all that it started. Safe to call twice."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("process %d of environments had ended", self.pid)
        self._child.wait()
        if self._mark is not None:
            end_programs(self._mark)
        if not self._owner.closed:
            self._owner.close()
            os.close(self._life)


@dataclass
class _Worker:
    """A process and the calls that it has not answered."""

    process: _Process
    episodes: set[str] = field(default_factory=set)
    calls: deque[int] = field(default_factory=deque)
    deadline: float = 0.0


class EnvironmentWorkers:
    """Plays many episodes in `num_workers` processes; an episode stays with one of them.

    step_timeout_s: longest time of one call; a process that takes longer is killed and replaced.
    memory_gb: limit of each process; None: none. Episodes of a process that ends are restored in another one
    (`Environment`), and the call that it ended in is made again once.
    """

    def __init__(
        self,
        environment: Environment[Any, Any],  # Any: of whatever acts
        *,
        num_workers: int,
        step_timeout_s: float,
        memory_gb: float | None = None,
    ) -> None:
        wire.require_sendable(environment)
        self._prototype, self._name = environment, type(environment).__name__
        self._step_timeout_s = step_timeout_s
        self._memory_bytes = None if memory_gb is None else int(memory_gb * 2**30)
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._home: dict[str, _Worker] = {}
        self._episodes: dict[str, _Episode] = {}
        self.num_restarts = 0
        """Processes that replaced others."""

    @property
    def pids(self) -> list[int]:
        """Process ids; none before the first episode."""
        return [worker.process.pid for worker in self._workers]

    def reset(self, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Answer | Lost]:
        """Begin episodes: name -> (task, seed). Returns what each one observes first, or why it cannot begin."""
        self._start()
        for name, (task, seed) in tasks.items():
            self._episodes[name] = _Episode(task, seed)
            home = min(self._workers, key=lambda worker: len(worker.episodes))
            home.episodes.add(name)
            self._home[name] = home
        return self._played([Reset(name, task, seed) for name, (task, seed) in tasks.items()])

    def step(self, actions: Mapping[str, Any]) -> dict[str, Answer | Lost]:  # Any: as the environment takes them
        """Take one step of each of some episodes. Returns the `Step` of each, or why the episode is lost."""
        return self._played([Act(name, action) for name, action in actions.items()])

    def end(self, names: Sequence[str]) -> None:
        """Forget episodes."""
        here = [name for name in names if name in self._episodes]
        self._played([Close(name) for name in here])
        for name in here:
            self._forget(name)

    def close(self) -> None:
        """Kill all processes. Safe to call twice."""
        for worker in self._workers:
            worker.process.kill()
        self._workers, self._home, self._episodes = [], {}, {}

    # Processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._workers:
            self._workers = [_Worker(_Process(self._prototype, self._memory_bytes)) for _ in range(self._num_workers)]
            for worker in self._workers:
                self._wait_until_ready(worker)

    def _wait_until_ready(self, worker: _Worker) -> None:
        """Raises ConfigError if the process cannot load the environment."""
        process = worker.process
        try:
            said = process.answer() if process.connection.poll(_START_TIMEOUT_S) else Raised("it says nothing")
        except (EOFError, OSError):
            said = Raised(f"its process {process.death()}")
        if isinstance(said, Raised):
            self.close()
            raise ConfigError(
                f"a process for {self._name} did not start within {_START_TIMEOUT_S:.0f} s: {said.reason}"
            )

    def _replace(self, worker: _Worker, why: str) -> None:
        """Another process for the worker, with its episodes as they were before the calls that are not answered."""
        logger.warning("environments (pid %d) %s; the process is replaced", worker.process.pid, why)
        worker.process.kill()
        worker.process = _Process(self._prototype, self._memory_bytes)
        self._wait_until_ready(worker)
        self.num_restarts += 1

    def _restored(self, worker: _Worker, name: str) -> Lost | None:
        """Bring an episode to where it was; or why that cannot be."""
        own = self._episodes[name]
        if not own.digest:
            return None  # it has not begun
        if own.state is not None:
            calls: list[Call] = [Restore(name, own.state)]
        elif self._prototype.deterministic:
            calls = [Reset(name, own.task, own.seed), *(Act(name, action) for action in own.actions)]
        else:
            return Lost(f"its process ended, and {self._name} is neither deterministic nor resumable")
        worker.process.send(calls)
        last: Answered | Raised = Answered(None)
        for _ in calls:
            if not worker.process.connection.poll(self._step_timeout_s):
                raise TimeoutError
            last = worker.process.answer()
            if isinstance(last, Raised):
                return Lost(f"it could not be restored: {last.reason}")
        if own.state is None and wire.digest(last.answer) != own.digest:
            return Lost(f"{self._name} is declared deterministic, and gives other answers the second time")
        return None

    # Calls -------------------------------------------------------------------------------------------------------

    def _played(self, calls: Sequence[Call]) -> dict[str, Answer | Lost]:
        """What each call gave, by episode; one call per episode."""
        found: dict[str, Answer] = {}
        losses = [0] * len(calls)
        for number, call in enumerate(calls):
            if self._episodes[call.episode].lost is None:
                self._home[call.episode].calls.append(number)
        for worker in self._workers:
            self._send(worker, calls)
        while busy := [worker for worker in self._workers if worker.calls]:
            left = min(worker.deadline for worker in busy) - time.monotonic()
            ready = set(wait([worker.process.connection for worker in busy], max(0.0, left)))
            for worker in busy:
                trouble = self._take(worker, calls, found, worker.process.connection in ready)
                if trouble is not None:
                    self._recover(worker, calls, losses, trouble)
        lost = {call.episode: self._episodes[call.episode].lost for call in calls}
        return {name: found[name] if why is None else Lost(why) for name, why in lost.items()}

    def _send(self, worker: _Worker, calls: Sequence[Call]) -> None:
        if not worker.calls:
            return
        worker.deadline = time.monotonic() + self._step_timeout_s
        try:
            worker.process.send([calls[number] for number in worker.calls])
        except OSError:
            logger.debug("the process %d is dead; reading from it says so", worker.process.pid)

    def _take(self, worker: _Worker, calls: Sequence[Call], found: dict[str, Answer], is_ready: bool) -> str | None:
        """Take the next answer of a worker. Returns what has happened to its process instead."""
        if not is_ready:
            if time.monotonic() < worker.deadline:
                return None
            return f"gave no answer within {self._step_timeout_s:g} s"
        try:
            said = worker.process.answer()
        except (EOFError, OSError):
            return worker.process.death()
        call = calls[worker.calls.popleft()]
        worker.deadline = time.monotonic() + self._step_timeout_s
        if isinstance(said, Raised):
            self._lose(call.episode, said.reason)
            return None
        found[call.episode] = said.answer
        own = self._episodes[call.episode]
        if isinstance(call, Act):
            own.actions.append(call.action)
        own.state, own.digest = said.state, wire.digest(said.answer)
        return None

    def _recover(self, worker: _Worker, calls: Sequence[Call], losses: list[int], why: str) -> None:
        """Replace a worker's process, restore its episodes, and make its calls again."""
        cause = worker.calls[0]
        losses[cause] += 1
        if losses[cause] >= _MAX_LOSSES:
            self._lose(calls[cause].episode, f"its process {why}, twice")
        self._on_new_process(worker, why)
        worker.calls = deque(number for number in worker.calls if calls[number].episode in worker.episodes)
        self._send(worker, calls)

    def _on_new_process(self, worker: _Worker, why: str) -> None:
        self._replace(worker, why)
        for name in sorted(worker.episodes):
            try:
                lost = self._restored(worker, name)
            except (EOFError, OSError, TimeoutError):
                self._lose(name, "its process ended again while it was restored")
                self._on_new_process(worker, f"ended while it restored the episode {name}")
                return
            if lost is not None:
                self._lose(name, lost.reason)

    def _lose(self, name: str, reason: str) -> None:
        self._episodes[name].lost = reason
        self._home[name].episodes.discard(name)

    def _forget(self, name: str) -> None:
        del self._episodes[name]
        self._home.pop(name).episodes.discard(name)
