"""Messages of a conversation between a model and what answers it, and rows of data that bring whole conversations.

Without torch, since processes of environments import it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.types.errors import ContractError

MESSAGES = "messages"
"""Key of a row's metadata with a conversation: mappings of `role` and `content`, the last one by the assistant."""
COMPLETION = "completion"
"""Key of a row's metadata with the answer to its prompt."""
ASSISTANT = "assistant"
"""Role of the model."""
USER = "user"
"""Role of who asks."""
SHOWN = "images"
"""Key of a message of a row with the number of its images; absent where it shows none."""


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
    """They stand before the content; of a message before the model's first turn where the content says "<image>", if it
    does."""


def brings_conversation(metadata: Mapping[str, Any] | None) -> bool:  # Any: JSON of a data file
    """True if a row brings a conversation."""
    return metadata is not None and (MESSAGES in metadata or COMPLETION in metadata)


def demonstration(
    prompt: str,
    metadata: Mapping[str, Any] | None,  # Any: JSON of a data file
    images: Sequence[ShownImage] = (),
) -> list[Message] | None:
    """The conversation that a row brings, its prompt included; None if it brings none.

    images: of the row, in the order in which its messages show them. Where no message counts any, the first one of the
    user shows all. Raises ContractError if the messages show another number of images.
    """
    row = metadata or {}
    if MESSAGES in row:
        said = [{**each, "role": str(each["role"]), "content": str(each["content"])} for each in row[MESSAGES]]
    elif COMPLETION in row:
        said = [{"role": USER, "content": prompt}, {"role": ASSISTANT, "content": str(row[COMPLETION])}]
    else:
        return None
    counts = [count if isinstance(count := each.get(SHOWN), int) else 0 for each in said]
    if images and not any(counts) and USER in (roles := [each["role"] for each in said]):
        counts[roles.index(USER)] = len(images)
    if sum(counts) != len(images):
        raise ContractError(f"the messages of a conversation show {sum(counts)} images, its row brings {len(images)}")
    rest = iter(images)
    return [
        Message(each["role"], each["content"], tuple(itertools.islice(rest, count)))
        for each, count in zip(said, counts, strict=True)
    ]
