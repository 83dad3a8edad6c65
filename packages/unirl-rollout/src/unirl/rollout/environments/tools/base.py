"""The contracts of a tool and of what offers several, and the forms in which tools are described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.rollout.environments.base import Task
from unirl.types.messages import ShownImage


class ToolError(Exception):
    """What the model did wrong, or what a tool could not do, in words for the model. The episode goes on."""


class ToolUnavailableError(ToolError):
    """A tool gave no answer, or none that can be read: its server died, hung or broke the protocol."""


@dataclass(frozen=True)
class Answer:
    """What a tool tells and shows."""

    text: str
    images: tuple[ShownImage, ...] = ()
    """They stand before the text."""


class Tool(ABC):
    """Something that a model calls by name. It is pickled once to each process of environments, and shared by all
    episodes of a process."""

    description: str
    """What it does, for the model."""
    parameters: Mapping[str, Any]  # Any: JSON
    """JSON schema of its arguments, an object."""
    deterministic: bool = False
    """True if equal calls always have equal answers; then an episode survives the end of its process."""
    shows_images: bool = False
    """True if its answers may show images."""

    @abstractmethod
    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str | Answer:  # Any: JSON, as `parameters` says
        """The answer, a text or one with images. Raises ToolError with what the model is told; what else it raises
        fails the episode."""


class ToolServer(ABC):
    """A program or service that says itself which tools it has. It is pickled as tools are."""

    deterministic: bool = False
    """As `Tool.deterministic`, for all of its tools."""
    shows_images: bool = False
    """As `Tool.shows_images`, for all of its tools."""
    starts_programs: bool = False
    """As `Environment.starts_programs`."""

    @abstractmethod
    def offer(self) -> Mapping[str, Tool]:
        """Its tools by the names that the model calls. Asked once, of the prototype, before it is sent to the processes
        that play. Raises ConfigError if it cannot be asked."""

    @abstractmethod
    def prepare(self) -> None:
        """Start what answers the calls of this process. Raises ConfigError if the tools are not those of `offer`."""


def openai_schema(name: str, tool: Tool) -> dict[str, Any]:  # Any: JSON
    """A tool as OpenAI's `tools`, which chat templates take."""
    return {
        "type": "function",
        "function": {"name": name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def mcp_schema(name: str, tool: Tool) -> dict[str, Any]:  # Any: JSON
    """A tool as the Model Context Protocol lists it."""
    return {"name": name, "description": tool.description, "inputSchema": dict(tool.parameters)}


def one_text(name: str, description: str | None = None) -> dict[str, Any]:  # Any: JSON
    """The JSON schema of one argument, a text."""
    said = {} if description is None else {"description": description}
    return {
        "type": "object",
        "properties": {name: {"type": "string", **said}},
        "required": [name],
        "additionalProperties": False,
    }
