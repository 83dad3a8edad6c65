"""What plays many episodes: processes next to the engine, or those of a pool. Who asks does not know which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unirl.rollout.environments.base import Environment, Task
from unirl.rollout.environments.begun import BegunEpisode, Lost
from unirl.rollout.environments.pooled import PooledEnvironments
from unirl.rollout.environments.process import Answer
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.types.protocols.hosting import HostingPool


class PlaysEpisodes(Protocol):
    """Implemented by EnvironmentWorkers and PooledEnvironments."""

    num_restarts: int
    """Processes that replaced others."""

    @property
    def pids(self) -> list[int]:
        """Process ids; none before the first episode."""
        ...

    def reset(self, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Answer | Lost]:
        """Begin episodes: name -> (task, seed). Returns what each one observes first, or why it cannot begin."""
        ...

    def step(self, actions: Mapping[str, Any]) -> dict[str, Answer | Lost]:  # Any: as the environment takes them
        """Take one step of each of some episodes. Returns the `Step` of each, or why the episode is lost."""
        ...

    def begun(self, name: str) -> BegunEpisode:
        """What continues an episode where it is not known."""
        ...

    def resume(self, episodes: Mapping[str, BegunEpisode]) -> dict[str, Lost]:
        """Continue episodes that others have begun, or that were forgotten here. Returns why those cannot be that are
        lost at once; others are found to be lost when they are stepped."""
        ...

    def end(self, names: Sequence[str]) -> None:
        """Forget episodes."""
        ...

    def close(self) -> None:
        """Forget all, and end what is not others' too. Safe to call twice."""
        ...


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of the processes that play: see `EnvironmentWorkers`."""

    step_timeout_s: float
    memory_gb: float | None

    def next_to_us(self, environment: Environment[Any, Any], num_workers: int) -> PlaysEpisodes:  # Any: whatever acts
        """Processes of this one."""
        return EnvironmentWorkers(
            environment, num_workers=num_workers, step_timeout_s=self.step_timeout_s, memory_gb=self.memory_gb
        )

    def in_pool(
        self,
        environment: Environment[Any, Any],  # Any: of whatever acts
        pool: HostingPool,
        at: str,
    ) -> PlaysEpisodes:
        """Those of a pool. at: where the environment stands in the recipe."""
        return PooledEnvironments(
            environment, pool, at=at, step_timeout_s=self.step_timeout_s, memory_gb=self.memory_gb
        )
