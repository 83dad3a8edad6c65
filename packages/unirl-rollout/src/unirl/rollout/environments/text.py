"""Environments that a language model talks to: its turns are the actions, messages are what it observes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.rollout.environments.base import Environment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message


@dataclass(frozen=True)
class Introduction:
    """What every prompt tells the model of an environment."""

    tools: Sequence[Mapping[str, Any]] = ()  # Any: JSON
    """The tools that it may call, as OpenAI's `tools`. Without any, no calls are looked for in what it writes."""
    system_prompt: str | None = None
    """The message of the system ahead of the prompt."""


class TextEnvironment(Environment[Turn, Sequence[Message]]):
    """`reset` returns no message if the row's prompt begins the episode, or one of the user that replaces it. `step`
    returns the messages that follow the model's turn; those of the last step are not read.

    The images of a row are in its task under "images", `unirl.types.messages.ShownImage` each.
    """

    shows_images: bool = False
    """True if its messages may show images. Then only a model reads them that takes images between turns."""

    def introduce(self) -> Introduction:
        """Asked once, of the prototype, before it is sent to the processes that play."""
        return Introduction()
