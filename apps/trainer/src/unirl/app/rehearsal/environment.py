"""An environment that answers every turn, whatever a model without weights writes."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.app.rehearsal.prompts import IMAGE_SIZE
from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import Introduction, TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import USER, Message, ShownImage


class AnsweringEnvironment(TextEnvironment):
    """Stands for `environment` with its introduction. An answer is one message: an image as large as the first one of
    the row where `environment` shows images, and no text. `unirl.app.rehearsal.texts` makes it as long as was asked."""

    deterministic = True

    def __init__(self, environment: TextEnvironment) -> None:
        self._environment = environment
        self.shows_images = environment.shows_images
        self._role = USER

    def introduce(self) -> Introduction:
        """What `environment` says, which may start servers of tools to ask them."""
        introduction = self._environment.introduce()
        self._role = "tool" if introduction.tools else USER
        return introduction

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt begins the episode."""
        first = next(iter(task.get("images", ())), None)
        height, width = (IMAGE_SIZE, IMAGE_SIZE) if first is None else (first.height, first.width)
        images = (ShownImage(height, width, bytes(3 * height * width)),) if self.shows_images else ()
        self._answer = Message(self._role, "", images)
        return ()

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """The episode goes on."""
        return Step((self._answer,))
