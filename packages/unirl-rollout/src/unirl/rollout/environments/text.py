"""Environments that a language model talks to: its turns are the actions, messages are what it observes."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.rollout.environments.base import Environment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message


class TextEnvironment(Environment[Turn, Sequence[Message]]):
    """`reset` returns no message if the row's prompt begins the episode, or one of the user that replaces it. `step`
    returns the messages that follow the model's turn; those of the last step are not read.

    The images of a row are in its task under "images", `unirl.types.messages.ShownImage` each.
    """

    shows_images: bool = False
    """True if its messages may show images. Then only a model reads them that takes images between turns."""
