"""The contract of a tool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from unirl.rollout.environments.base import Task


class ToolError(Exception):
    """What the model did wrong, or what a tool could not do, in words for the model. The episode goes on."""


class Tool(ABC):
    """Something that a model calls by name. It is pickled once to each process of environments, and shared by all
    episodes of a process."""

    description: ClassVar[str]
    """What it does, for the model."""
    parameters: ClassVar[Mapping[str, Any]]  # Any: JSON
    """JSON schema of its arguments, an object."""
    deterministic: ClassVar[bool] = False
    """True if equal calls always have equal answers; then an episode survives the end of its process."""

    @abstractmethod
    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:  # Any: JSON, as `parameters` says
        """The answer. Raises ToolError with what the model is to be told; what else it raises fails the episode."""


def one_text(name: str, description: str | None = None) -> dict[str, Any]:  # Any: JSON
    """The JSON schema of one argument, a text."""
    said = {} if description is None else {"description": description}
    return {
        "type": "object",
        "properties": {name: {"type": "string", **said}},
        "required": [name],
        "additionalProperties": False,
    }
