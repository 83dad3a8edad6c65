"""Answers a model's tool calls until it writes a turn without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import Introduction, TextEnvironment
from unirl.rollout.environments.tools.base import (
    Answer,
    Tool,
    ToolError,
    ToolServer,
    ToolUnavailableError,
    openai_schema,
)
from unirl.rollout.turns.calls import MalformedCall, ToolCall, Turn
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.messages import Message

_MALFORMED = ("malformed_calls",)


@bounded("turns.environment")
class ToolUse(TextEnvironment):
    """A turn with tool calls gets one message per call; a turn without ends the episode.

    tools: name -> tool, as the model calls it, or a server of tools, which names them itself. max_calls: most calls
    that are made in one turn; the others are answered with an error. max_chars: of one answer, of which the rest is
    cut. cost_per_call: what a call takes off the return.
    What is wrong with a call is told to the model and counted: it never ends the episode.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool | ToolServer],
        *,
        max_calls: PositiveInt = 8,
        max_chars: PositiveInt = 4000,
        cost_per_call: NonNegative = 0.0,
    ) -> None:
        if not tools:
            raise ConfigError("turns.environment.tools is empty; give at least one tool, by name")
        self._given = dict(tools)
        self._servers = [each for each in tools.values() if isinstance(each, ToolServer)]
        self._tools = {name: each for name, each in tools.items() if isinstance(each, Tool)}
        self._max_calls = max_calls
        self._max_chars = max_chars
        self._cost_per_call = cost_per_call
        self.deterministic = all(tool.deterministic for tool in tools.values())
        self.shows_images = any(tool.shows_images for tool in tools.values())
        self.starts_programs = any(server.starts_programs for server in self._servers)

    @property
    def schemas(self) -> list[dict[str, Any]]:  # Any: JSON
        """The tools as OpenAI's `tools`, which chat templates take; those of servers once `introduce` has asked."""
        return [openai_schema(name, tool) for name, tool in self._tools.items()]

    def introduce(self) -> Introduction:
        """The tools, for which servers are asked. Raises ConfigError if one cannot be, or a name is there twice."""
        self._tools, homes = {}, {}
        for place, given in self._given.items():
            for name, tool in given.offer().items() if isinstance(given, ToolServer) else ((place, given),):
                if name in self._tools:
                    raise ConfigError(
                        f"turns.environment.tools: {homes[name]} and {place} both have a tool {name!r}. Give one "
                        f"another name, with tools: {{{name}: OTHER}} of its server."
                    )
                self._tools[name], homes[name] = tool, place
        return Introduction(self.schemas)

    def prepare(self) -> None:
        """Start the servers."""
        for server in self._servers:
            server.prepare()

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt begins the episode."""
        self._task = task
        return ()

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """Make the calls of a turn, in order."""
        if not action.calls:
            return Step((), terminated=True)
        counts = {"calls": 0.0, "malformed_calls": 0.0, "tool_errors": 0.0}
        if self._servers:
            counts["unavailable_tools"] = 0.0
        messages = []
        for number, call in enumerate(action.calls):
            if number >= self._max_calls:
                answer, kinds = Answer(f"error: at most {self._max_calls} calls per turn"), _MALFORMED
            else:
                answer, kinds = self._answer(call)
            counts["calls"] += 1
            for each in kinds:
                counts[each] += 1
            messages.append(Message("tool", self._cut(answer.text), answer.images))
        return Step(tuple(messages), reward=-self._cost_per_call * len(action.calls), counts=counts)

    def _answer(self, call: ToolCall | MalformedCall) -> tuple[Answer, tuple[str, ...]]:
        """What the model is told, and which counts it adds to."""
        if isinstance(call, MalformedCall):
            return Answer(f"error: {call.reason}"), _MALFORMED
        if call.name not in self._tools:
            known = ", ".join(self._tools)
            return Answer(f"error: there is no tool {call.name!r}; there are {known}"), _MALFORMED
        tool = self._tools[call.name]
        try:
            jsonschema.validate(call.arguments, dict(tool.parameters))
        except jsonschema.ValidationError as error:
            return Answer(f"error: {error.message}"), _MALFORMED
        try:
            found = tool(call.arguments, self._task)
        except ToolUnavailableError as error:
            return Answer(f"error: {error}"), ("tool_errors", "unavailable_tools")
        except ToolError as error:
            return Answer(f"error: {error}"), ("tool_errors",)
        return (found if isinstance(found, Answer) else Answer(found)), ()

    def _cut(self, answer: str) -> str:
        left_out = len(answer) - self._max_chars
        return answer if left_out <= 0 else f"{answer[: self._max_chars]}... ({left_out} characters more)"
