"""The contract of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from unirl.rollout.environments.base import Task


class ToolError(Exception):
    """What the model did wrong, or what a tool could not do, in words for the model. The episode goes on."""


class Tool(Protocol):
    """Something that a model calls by name. Runs in a process of environments; it is pickled once, and shared by all
    episodes of a process."""

    @property
    def description(self) -> str:
        """What it does, for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:  # Any: JSON
        """JSON schema of its arguments, an object."""
        ...

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:  # Any: JSON, as `parameters` says
        """The answer. Raises ToolError with what the model is to be told."""
        ...
