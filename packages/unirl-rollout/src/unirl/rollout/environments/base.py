"""The contract of an environment, whatever acts in it: reset, step, and how an episode ends."""

from __future__ import annotations

import copy
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

Task = Mapping[str, Any]  # Any: a row of a user's data file
"""What an episode is about: the row's metadata, and its prompt under "prompt"."""
ActionT = TypeVar("ActionT")
ObservationT = TypeVar("ObservationT")


@dataclass(frozen=True)
class Step(Generic[ObservationT]):
    """What an environment answers to an action."""

    observation: ObservationT
    reward: float = 0.0
    """What this step earned; the return of the episode is the sum."""
    terminated: bool = False
    """True if the episode has come to its own end, after which nothing more can be earned."""
    truncated: bool = False
    """True if the environment stops it before that."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What happened, by name; summed over the steps of an episode and shown as metrics."""


class Environment(ABC, Generic[ActionT, ObservationT]):
    """One kind of episodes. The object of a recipe is a prototype: it is pickled to the processes that play, and
    `fresh` makes one object for each episode.

    A worker process that dies or hangs is replaced, and its episodes are restored: from `save` where the class sets
    `resumable`, else by the same seed and actions again where it sets `deterministic`; other episodes are lost.
    """

    deterministic: bool = False
    """True if the same task, seed and actions always give the same answers."""
    resumable: bool = False
    """True if `save` and `restore` work."""
    python: str | None = None
    """Interpreter of the processes that play, whose Python environment has unirl-rollout and what the class imports
    when an episode begins; None: the one that runs."""
    starts_programs: bool = False
    """True if episodes start programs that could outlive the process that plays them. They are ended with it."""

    def fresh(self) -> Self:
        """An environment for one episode. A shallow copy: what the prototype holds is shared by all episodes of a
        process and must not change."""
        return copy.copy(self)

    def prepare(self) -> None:  # noqa: B027 - most have nothing to load
        """Load what takes long. Called once in each process that plays, of the prototype, before its first episode."""

    @abstractmethod
    def reset(self, task: Task, seed: int) -> ObservationT:
        """Begin the episode. The same task and seed begin equally."""

    @abstractmethod
    def step(self, action: ActionT) -> Step[ObservationT]:
        """Act. Raises whatever goes wrong: the episode then counts as failed."""

    def save(self) -> Any:  # Any: of the class's own
        """The state of a running episode, in values that can be pickled; by default all attributes."""
        return copy.deepcopy(vars(self))

    def restore(self, state: Any) -> None:  # Any: as above
        """Continue from a state of `save`."""
        vars(self).update(state)

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """The episode is over."""


def reason_of(error: BaseException) -> str:
    """What an environment raised, and where, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"
