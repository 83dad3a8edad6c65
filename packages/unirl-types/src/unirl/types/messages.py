"""Messages of a conversation between a model and what answers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message that the model did not write."""

    role: str
    """As the chat template calls who speaks: "tool", "user"."""
    content: str
