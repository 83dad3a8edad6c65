"""A tool that a language model calls by a JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.tools.base import Tool, ToolError


class MyTool(Tool):
    """Adds whole numbers.

    max_digits: of a number. The constructor keeps plain values: the object is sent to processes.
    """

    description: str = "Add whole numbers."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example 48213+95760"}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    """JSON schema of the arguments, against which calls are checked."""
    deterministic: bool = True
    """Equal calls have equal answers, so an episode survives the end of its process."""

    def __init__(self, max_digits: int = 9) -> None:
        self.max_digits = max_digits

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:
        """The answer. task: the row's metadata. A ToolError is told to the model; any other exception fails the
        episode. Never evaluate what a model wrote."""
        numbers = arguments["expression"].replace(" ", "").split("+")
        for number in numbers:
            if not re.fullmatch(r"[0-9]+", number):
                raise ToolError(f"{number!r} is no whole number")
            if len(number) > self.max_digits:
                raise ToolError(f"{number} has more than {self.max_digits} digits")
        return str(sum(map(int, numbers)))
