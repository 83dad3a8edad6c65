"""An environment that a language model takes turns with: it answers until an episode ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message


class MyEnvironment(TextEnvironment):
    """The model gives the answer of a row, and tries again while it is told that it is too low or too high.

    cost: what each wrong try takes off the return. The constructor keeps plain values: the object is sent to processes.
    """

    deterministic: ClassVar[bool] = True
    """The same row, seed and turns have the same answers, so an episode survives the end of its process."""

    def __init__(self, cost: float = 0.1) -> None:
        self.cost = cost

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin an episode. task: the row's metadata, and its prompt under "prompt". seed: one for all episodes of a
        prompt. No message: the row's prompt is what the model reads first; one of the user would replace it."""
        self.answer = int(task["answer"])
        return ()

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """Answer a turn. counts become metrics. What is raised here fails the episode, which then has no reward."""
        written = action.text.strip()
        if not (written.isascii() and written.isdigit()) or len(written) > 20:
            return Step((Message("user", "write a number"),), reward=-self.cost, counts={"no_number": 1.0})
        if int(written) == self.answer:
            return Step((), terminated=True, counts={"right": 1.0})
        hint = "too low" if int(written) < self.answer else "too high"
        return Step((Message("user", hint),), reward=-self.cost, counts={"wrong": 1.0})
