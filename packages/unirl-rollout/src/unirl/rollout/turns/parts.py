"""The environment's side of turns: the parts of a batch, and what plays their episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.begun import BegunEpisode, Lost
from unirl.rollout.environments.playing import PlaysEpisodes, ProcessLimits
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.rollout.turns.episodes import Episode
from unirl.types.errors import ContractError
from unirl.types.protocols.hosting import HostingPool


@dataclass
class Part:
    """Episodes that take their turns together."""

    number: int
    acting: dict[str, Episode] = field(default_factory=dict)
    """Those that the environment answers, by name."""
    answer: Future[tuple[dict[str, Any], float]] | None = None  # Any: steps
    is_over: bool = False


class Parts:
    """What plays the episodes of each part of a batch: row r is in part r % num_parts.

    num_workers: processes of a part. waits_for_pool: a pool plays them, and is given later.
    """

    def __init__(
        self,
        environment: TextEnvironment,
        limits: ProcessLimits,
        *,
        num_parts: int,
        num_workers: int,
        waits_for_pool: bool,
    ) -> None:
        self._environment, self._limits = environment, limits
        self._waits_for_pool = waits_for_pool
        self._workers = [limits.next_to_us(environment, num_workers) for _ in range(num_parts)]
        self._waiting: dict[str, int] = {}
        """Episodes that were to be continued when the last call ended, with their parts."""
        self._answering = ThreadPoolExecutor(num_parts, "unirl-environment")

    def play_in(self, pool: HostingPool) -> None:
        """Let the processes of a pool play. Called before the first episode."""
        self._workers = [self._limits.in_pool(self._environment, pool, "turns") for _ in self._workers]
        self._waits_for_pool = False

    def require_players(self) -> None:
        """Raise ContractError if the pool was not given."""
        if self._waits_for_pool:
            raise ContractError("turns.pool is set, and no pool was given: play_in comes before generate")

    def fresh(self) -> list[Part]:
        """The parts of a batch that begins."""
        return [Part(number) for number in range(len(self._workers))]

    def reset(self, tasks: Mapping[int, tuple[str, Task, int]]) -> tuple[dict[str, Any], float]:  # Any: see Environment
        """Begin episodes: row -> (name, task, seed). Returns what each observes first, or `Lost`, by name, and the
        seconds that it took."""
        started = time.perf_counter()
        cut: list[dict[str, tuple[Task, int]]] = [{} for _ in self._workers]
        for row, (name, task, seed) in tasks.items():
            cut[row % len(cut)][name] = task, seed
        opened: dict[str, Any] = {}
        for part in self._answering.map(_reset, self._workers, cut):
            opened.update(part)
        return opened, time.perf_counter() - started

    def step(self, part: Part, actions: Mapping[str, Turn]) -> None:
        """Let the environment answer the episodes of a part, in a thread: `part.answer` has the `Step` or `Lost` of
        each, and the seconds that it took."""
        part.answer = self._answering.submit(_timed, self._workers[part.number].step, actions)

    def keep(self, episodes: Mapping[int, str]) -> dict[int, BegunEpisode]:
        """Let episodes wait for a later call. Returns what another engine needs to continue each.

        episodes: row -> name. Those that wait longer are forgotten: others have continued them.
        """
        waiting = {name: row % len(self._workers) for row, name in episodes.items()}
        self.end([name for name in self._waiting if name not in waiting])
        self._waiting = waiting
        return {row: self._workers[self._waiting[name]].begun(name) for row, name in episodes.items()}

    def resume(self, begun: Mapping[int, tuple[str, BegunEpisode]]) -> dict[int, Lost]:
        """Continue episodes: row -> (name, what `keep` gave). Those that do not wait here are restored; returns why
        some cannot be."""
        lost: dict[int, Lost] = {}
        for part, workers in enumerate(self._workers):
            own = {row: each for row, each in begun.items() if row % len(self._workers) == part}
            missing = {name: each for name, each in own.values() if self._waiting.get(name) != part}
            ways = {name: each.restoration(name, self._environment) for name, each in missing.items()}
            gone = {name: way for name, way in ways.items() if isinstance(way, Lost)}
            gone |= workers.resume({name: each for name, each in missing.items() if name not in gone})
            lost.update({row: gone[name] for row, (name, _) in own.items() if name in gone})
        for name, _ in begun.values():
            self._waiting.pop(name, None)
        return lost

    def end(self, names: Sequence[str]) -> None:
        """Forget episodes."""
        for workers in self._workers:
            workers.end(names)

    def shutdown(self) -> None:
        """End the processes that are ours."""
        self._answering.shutdown()
        for workers in self._workers:
            workers.close()


def _reset(workers: PlaysEpisodes, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Any]:  # Any: see Environment
    return workers.reset(tasks)


def _timed(
    step: Callable[[Mapping[str, Turn]], dict[str, Any]], actions: Mapping[str, Turn]
) -> tuple[dict[str, Any], float]:
    """What the environment answers, and the seconds that it took."""
    started = time.perf_counter()
    return step(actions), time.perf_counter() - started
