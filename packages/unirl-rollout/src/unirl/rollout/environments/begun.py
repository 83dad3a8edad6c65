"""What is kept of an episode while a process plays it, so that another process can continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment, Task
from unirl.rollout.environments.process import Act, Answered, Call, Reset, Restore

MAX_LOSSES = 2
"""Processes that one call may end before its episode is given up."""


@dataclass(frozen=True)
class Lost:
    """Why an episode cannot go on."""

    reason: str


@dataclass
class BegunEpisode:
    """What is needed to begin an episode again elsewhere."""

    task: Task
    seed: int
    actions: list[Any] = field(default_factory=list)  # Any: as the environment takes them
    state: Any = None  # Any: of the class's own
    digest: bytes = b""
    """Digest of the last answer; empty before the first."""
    lost: str | None = None
    """Why it cannot go on."""

    def keep(self, call: Call, said: Answered) -> None:
        """Note a call that is answered."""
        if isinstance(call, Act):
            self.actions.append(call.action)
        self.state, self.digest = said.state, wire.digest(said.answer)

    def restoration(self, name: str, environment: Environment[Any, Any]) -> Sequence[Call] | Lost:  # Any: whatever acts
        """The calls that bring it to where it was, in a process that does not know it; none if it has not begun. Or why
        there are none."""
        if not self.digest:
            return []
        if self.state is not None:
            return [Restore(name, self.state)]
        if environment.deterministic:
            return [Reset(name, self.task, self.seed), *(Act(name, action) for action in self.actions)]
        return Lost(f"its process is gone, and {type(environment).__name__} is neither deterministic nor resumable")

    def difference(self, last: Answered, environment: Environment[Any, Any]) -> Lost | None:  # Any: whatever acts
        """Why the last answer to `restoration` is not that of the process before."""
        if self.state is None and wire.digest(last.answer) != self.digest:
            return Lost(
                f"{type(environment).__name__} is declared deterministic, and gives other answers the second time"
            )
        return None
