"""Processes that play episodes: calls have deadlines, and what dies or hangs is replaced without losing the others."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment, Task
from unirl.rollout.environments.begun import MAX_LOSSES, BegunEpisode, Lost
from unirl.rollout.environments.child import PlayingProcess, Prototype
from unirl.rollout.environments.process import Act, Answer, Answered, Call, Close, Raised, Reset
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass
class _Worker:
    """A process and the calls that it has not answered."""

    process: PlayingProcess
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
        self._environment = environment
        self._step_timeout_s = step_timeout_s
        self._memory_gb = memory_gb
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._home: dict[str, _Worker] = {}
        self._episodes: dict[str, BegunEpisode] = {}
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
            self._settle(name, BegunEpisode(task, seed))
        return self._played([Reset(name, task, seed) for name, (task, seed) in tasks.items()])

    def step(self, actions: Mapping[str, Any]) -> dict[str, Answer | Lost]:  # Any: as the environment takes them
        """Take one step of each of some episodes. Returns the `Step` of each, or why the episode is lost."""
        return self._played([Act(name, action) for name, action in actions.items()])

    def begun(self, name: str) -> BegunEpisode:
        """What continues an episode where it is not known."""
        return self._episodes[name]

    def resume(self, episodes: Mapping[str, BegunEpisode]) -> dict[str, Lost]:
        """Continue episodes that others have begun, or that were forgotten here. Returns why some cannot be."""
        if episodes:
            self._start()
        for name, episode in episodes.items():
            home = self._settle(name, episode)
            self._restore(home, [name])
        lost = {name: self._episodes[name].lost for name in episodes}
        return {name: Lost(why) for name, why in lost.items() if why is not None}

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
            self._workers = [_Worker(self._process()) for _ in range(self._num_workers)]
            for worker in self._workers:
                self._wait_until_ready(worker)

    def _process(self) -> PlayingProcess:
        return PlayingProcess(Prototype.of(self._environment, self._memory_gb))

    def _wait_until_ready(self, worker: _Worker) -> None:
        """Raises ConfigError if the process cannot load the environment; then all are stopped."""
        try:
            worker.process.require_ready()
        except ConfigError:
            self.close()
            raise

    def _replace(self, worker: _Worker, why: str) -> None:
        """Another process for the worker, with its episodes as they were before the calls that are not answered."""
        logger.warning("environments (pid %d) %s; the process is replaced", worker.process.pid, why)
        worker.process.kill()
        worker.process = self._process()
        self._wait_until_ready(worker)
        self.num_restarts += 1

    def _restored(self, worker: _Worker, name: str) -> Lost | None:
        """Bring an episode to where it was; or why that cannot be."""
        own = self._episodes[name]
        calls = own.restoration(name, self._environment)
        if isinstance(calls, Lost):
            return calls
        if not calls:
            return None
        worker.process.send(calls)
        last = Answered(None)
        for _ in calls:
            if not worker.process.connection.poll(self._step_timeout_s):
                raise TimeoutError
            said = worker.process.answer()
            if isinstance(said, Raised):
                return Lost(f"it could not be restored: {said.reason}")
            last = said
        return own.difference(last, self._environment)

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
        self._episodes[call.episode].keep(call, said)
        return None

    def _recover(self, worker: _Worker, calls: Sequence[Call], losses: list[int], why: str) -> None:
        """Replace a worker's process, restore its episodes, and make its calls again."""
        cause = worker.calls[0]
        losses[cause] += 1
        if losses[cause] >= MAX_LOSSES:
            self._lose(calls[cause].episode, f"its process {why}, twice")
        self._on_new_process(worker, why)
        worker.calls = deque(number for number in worker.calls if calls[number].episode in worker.episodes)
        self._send(worker, calls)

    def _on_new_process(self, worker: _Worker, why: str) -> None:
        self._replace(worker, why)
        self._restore(worker, sorted(worker.episodes))

    def _restore(self, worker: _Worker, names: Sequence[str]) -> None:
        """Bring episodes to where they were; those of a process that ends meanwhile once more."""
        for name in names:
            try:
                lost = self._restored(worker, name)
            except (EOFError, OSError, TimeoutError):
                self._lose(name, "its process ended again while it was restored")
                self._on_new_process(worker, f"ended while it restored the episode {name}")
                return
            if lost is not None:
                self._lose(name, lost.reason)

    def _settle(self, name: str, episode: BegunEpisode) -> _Worker:
        """A home for an episode: the process with the fewest."""
        home = min(self._workers, key=lambda worker: len(worker.episodes))
        home.episodes.add(name)
        self._episodes[name], self._home[name] = episode, home
        return home

    def _lose(self, name: str, reason: str) -> None:
        self._episodes[name].lost = reason
        self._home[name].episodes.discard(name)

    def _forget(self, name: str) -> None:
        del self._episodes[name]
        self._home.pop(name).episodes.discard(name)
