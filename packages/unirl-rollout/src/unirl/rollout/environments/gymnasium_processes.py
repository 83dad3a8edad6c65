"""An environment of gymnasium in processes: deadlines for its steps, and episodes that outlive the process they ran in.

Legend: see `unirl.rollout.environments.vector`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from unirl.rollout.environments.base import Environment, Step, Task
from unirl.rollout.environments.begun import Lost
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.rollout.environments.playing import ProcessLimits
from unirl.rollout.environments.vector import EnvironmentFault, Floats, Played, Seen, Spaces, VectorEnvironment
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.hosting import HostingPool

_FREE: dict[str, list[GymnasiumEnvironment]] = {}
"""Environments of this process whose episode is over, by what they were made with: some take long to make."""


@dataclass(frozen=True)
class Chunk:
    """What one episode shows after a chunk."""

    seen: Seen
    num_moves: int
    success: float
    """NaN where the environment does not say."""


class GymnasiumEpisode(Environment[Floats, Chunk]):
    """One episode of an environment by its id; an action is a chunk of moves [H, D]. Keywords as
    `GymnasiumEnvironment`, and `deterministic`."""

    def __init__(self, options: Mapping[str, Any], *, deterministic: bool) -> None:  # Any: keywords
        self._options = dict(options)
        self.deterministic = deterministic
        self._own: GymnasiumEnvironment | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:  # Any: its attributes
        """In a process: one environment is made at once, so that deadlines of episodes count no import."""
        vars(self).update(state)
        self._free().append(GymnasiumEnvironment(**self._options))

    def fresh(self) -> GymnasiumEpisode:
        """Another episode."""
        return GymnasiumEpisode(self._options, deterministic=self.deterministic)

    def reset(self, task: Task, seed: int) -> Chunk:
        """Begin the episode."""
        free = self._free()
        self._own = free.pop() if free else GymnasiumEnvironment(**self._options)
        seen = self._own.start([seed])
        _require(self._own.lost[0])
        return Chunk(seen, 0, math.nan)

    def step(self, action: Floats) -> Step[Chunk]:
        """Make the moves until the episode ends."""
        assert self._own is not None  # noqa: S101 - reset comes first
        played = self._own.play([0], action[None])
        _require(played.errors[0])
        return Step(
            observation=Chunk(played.seen, int(played.num_moves[0]), float(played.successes[0])),
            reward=float(played.rewards[0]),
            terminated=bool(played.terminated[0]),
            truncated=bool(played.truncated[0]),
        )

    def close(self) -> None:
        """Leave the environment to the next episode."""
        if self._own is not None:
            self._free().append(self._own)
            self._own = None

    def _free(self) -> list[GymnasiumEnvironment]:
        return _FREE.setdefault(repr(self._options), [])


@bounded("engine.environment")
class GymnasiumProcesses(VectorEnvironment):
    """As `GymnasiumEnvironment`, in processes: for environments that take more than about a millisecond per move, and
    for those that fail.

    id, options, max_moves, shows: see `GymnasiumEnvironment`.
    num_processes: processes that share the episodes, next to the engine. pool: the pool of kind env whose processes
        play instead. step_timeout_s: longest time of a chunk of moves of one episode.
    memory_gb: limit of each process; None: none.
    deterministic: the same seed and moves always give the same observations. Episodes of a process that died or hung
        are then played again to where they were; else they are lost.
    An episode whose environment raises, or is lost, has no reward; the others go on.
    """

    is_gymnasium: ClassVar[bool] = True

    def __init__(
        self,
        id: str,
        *,
        num_processes: PositiveInt | None = None,
        options: Mapping[str, Any] | None = None,  # Any: keywords of any environment
        max_moves: PositiveInt | None = None,
        shows: bool = False,
        step_timeout_s: Positive = 60.0,
        memory_gb: Positive | None = None,
        deterministic: bool = True,
        pool: str | None = None,
    ) -> None:
        if (num_processes is None) == (pool is None):
            raise ConfigError(
                f"engine.environment: num_processes = {num_processes} and pool = {pool}; set one of them, processes "
                "next to the engine or a pool of kind env."
            )
        keywords = {"id": id, "options": dict(options or {}), "max_moves": max_moves, "shows": shows}
        looked_at = GymnasiumEnvironment(**keywords)
        self._spaces, self._shows = looked_at.spaces, shows
        looked_at.close()
        self._episode = GymnasiumEpisode(keywords, deterministic=deterministic)
        self._limits = ProcessLimits(step_timeout_s, memory_gb)
        self._workers = self._limits.next_to_us(self._episode, num_processes or 1)
        self._waits_for_pool = pool is not None
        self._names: list[str] = []
        self._last: dict[str, Seen] = {}

    def play_in(self, pool: HostingPool) -> None:
        """Let the processes of a pool play. Called once, before the first episode."""
        self._workers = self._limits.in_pool(self._episode, pool, "engine.environment")
        self._waits_for_pool = False

    @property
    def spaces(self) -> Spaces:
        """Sizes of the environment."""
        return self._spaces

    @property
    def pids(self) -> list[int]:
        """Ids of the processes; none before the first episode."""
        return self._workers.pids

    @property
    def num_restarts(self) -> int:
        """Processes that replaced others."""
        return self._workers.num_restarts

    def start(self, seeds: Sequence[int]) -> Seen:
        """Begin an episode for each seed, spread over the processes."""
        if self._waits_for_pool:
            raise ContractError("engine.environment.pool is set, and no pool was given: play_in comes before start")
        self._workers.end(self._names)
        self._names = [str(row) for row in range(len(seeds))]
        begun = self._workers.reset({name: ({}, seed) for name, seed in zip(self._names, seeds, strict=True)})
        self._last = {name: each.seen for name, each in begun.items() if not isinstance(each, Lost)}
        lost = {name: each.reason for name, each in begun.items() if isinstance(each, Lost)}
        if lost:
            blank = self._blank(next(iter(self._last.values()), None), next(iter(lost.values())))
            self._last |= dict.fromkeys(lost, blank)
        return Seen.concat([self._last[name] for name in self._names])

    def play(self, rows: Sequence[int], moves: Floats) -> Played:
        """Make the moves, each episode until it ends. A lost one shows what it showed last."""
        names = [self._names[row] for row in rows]
        found = self._workers.step({name: moves[place] for place, name in enumerate(names)})
        answers = [found[name] for name in names]
        steps: list[Step[Chunk] | None] = [None if isinstance(each, Lost) else each for each in answers]
        self._last.update(
            {name: step.observation.seen for name, step in zip(names, steps, strict=True) if step is not None}
        )
        return Played(
            seen=Seen.concat([self._last[name] for name in names]),
            rewards=np.array([0.0 if step is None else step.reward for step in steps]),
            num_moves=np.array([1 if step is None else step.observation.num_moves for step in steps], np.int64),
            terminated=np.array([step is not None and step.terminated for step in steps]),
            truncated=np.array([step is not None and step.truncated for step in steps]),
            successes=np.array([math.nan if step is None else step.observation.success for step in steps]),
            errors=[each.reason if isinstance(each, Lost) else None for each in answers],
        )

    def _blank(self, other: Seen | None, reason: str) -> Seen:
        """What an episode shows that could not begin. Raises EnvironmentFault if frames are drawn and no other episode
        has begun, so that their size is unknown."""
        if other is not None:
            return other.blank()
        if self._shows:
            raise EnvironmentFault(f"no episode has begun: {reason}")
        return self._spaces.nothing(1)

    def close(self) -> None:
        """End the processes."""
        self._workers.close()
        self._names = []


def _require(lost: str | None) -> None:
    """Raises EnvironmentFault if an episode is lost."""
    if lost is not None:
        raise EnvironmentFault(lost)
