"""The contract of a tool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from unirl.rollout.environments.base import Task
from unirl.types.messages import ShownImage


class ToolError(Exception):
    """What the model did wrong, or what a tool could not do, in words for the model. The episode goes on."""


@dataclass(frozen=True)
class Answer:
    """What a tool tells and shows."""

    text: str
    images: tuple[ShownImage, ...] = ()
    """They stand before the text."""


class Tool(ABC):
    """Something that a model calls by name. It is pickled once to each process of environments, and shared by all
    episodes of a process."""

    description: ClassVar[str]
    """What it does, for the model."""
    parameters: ClassVar[Mapping[str, Any]]  # Any: JSON
    """JSON schema of its arguments, an object."""
    deterministic: ClassVar[bool] = False
    """True if equal calls always have equal answers; then an episode survives the end of its process."""
    shows_images: ClassVar[bool] = False
    """True if its answers may show images."""

    @abstractmethod
    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str | Answer:  # Any: JSON, as `parameters` says
        """The answer, a text or one with images. Raises ToolError with what the model is told; what else it raises
        fails the episode."""


def one_text(name: str, description: str | None = None) -> dict[str, Any]:  # Any: JSON
    """The JSON schema of one argument, a text."""
    said = {} if description is None else {"description": description}
    return {
        "type": "object",
        "properties": {name: {"type": "string", **said}},
        "required": [name],
        "additionalProperties": False,
    }
