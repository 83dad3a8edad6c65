"""Messages of a conversation between a model and what answers it, and rows of data that bring whole conversations.

Without torch, since processes of environments import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.types.errors import ContractError

MESSAGES = "messages"
"""Key of a row's metadata with a conversation: mappings of `role` and `content`, the last one by the assistant."""
COMPLETION = "completion"
"""Key of a row's metadata with the answer to its prompt."""
ASSISTANT = "assistant"
"""Role of the model."""


@dataclass(frozen=True)
class ShownImage:
    """An image of 8 bits as a plain value: equal to others that show the same, and sent to other processes as it is."""

    height: int
    width: int
    pixels: bytes
    """Red, green and blue of each pixel, row by row."""

    def __post_init__(self) -> None:
        if len(self.pixels) != 3 * self.height * self.width or not self.pixels:
            raise ContractError(f"an image of {self.width} x {self.height} pixels has {len(self.pixels)} bytes")


@dataclass(frozen=True)
class Message:
    """One message."""

    role: str
    """As the chat template calls who speaks: "user", "assistant", "tool", "system"."""
    content: str
    images: tuple[ShownImage, ...] = ()
    """They stand before the content."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as tokens."""

    prompt: list[int]
    """All that stands before the model's first turn."""
    tokens: list[int]
    """The model's turns, each with the token that ends it, and what stands between them."""
    is_written: list[bool]
    """True on the model's turns."""


def demonstration(prompt: str, metadata: Mapping[str, Any] | None) -> list[Message] | None:  # Any: JSON of a data file
    """The conversation that a row brings, its prompt included; None if it brings none."""
    row = metadata or {}
    if MESSAGES in row:
        return [Message(str(each["role"]), str(each["content"])) for each in row[MESSAGES]]
    if COMPLETION in row:
        return [Message("user", prompt), Message(ASSISTANT, str(row[COMPLETION]))]
    return None
