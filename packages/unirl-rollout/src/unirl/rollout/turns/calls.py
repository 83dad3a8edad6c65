"""Tool calls in what a model wrote: found by their tags, parsed as JSON, never evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class MalformedCall:
    """What stands between the tags and is no call."""

    reason: str


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one turn."""

    text: str
    """Without special tokens."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    prose: str = ""
    """The text without the calls and their tags, where calls are looked for."""


def parsed_call(text: str) -> ToolCall | MalformedCall:
    """The call of a JSON object {"name": text, "arguments": object}, with no other keys than "id" and "type"."""
    try:
        found = json.loads(text, parse_constant=_refused)
    except ValueError as error:
        return MalformedCall(f"no JSON: {error}")
    except RecursionError:
        return MalformedCall("no JSON: nested too deeply")
    if not isinstance(found, dict):
        return MalformedCall(f'a {type(found).__name__} where {{"name": ..., "arguments": {{...}}}} is expected')
    name, arguments = found.get("name"), found.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return MalformedCall('"name" must be a text and "arguments" an object')
    others = sorted(set(found) - {"name", "arguments", "id", "type"})
    if others:
        return MalformedCall(f"unknown keys {others}; a call has name and arguments")
    return ToolCall(name, arguments)


def calls_of(
    tokens: Sequence[int], begin: int, end: int, text_of: Callable[[Sequence[int]], str]
) -> tuple[ToolCall | MalformedCall, ...]:
    """The calls between the tokens `begin` and `end`, in order. A tag that is spelled in other tokens is text.

    A tag that is opened and not closed, or closed and not opened, is malformed.
    """
    found: list[ToolCall | MalformedCall] = []
    start: int | None = None
    for place, token in enumerate(tokens):
        if token == begin:
            if start is not None:
                found.append(MalformedCall("a call begins within another"))
            start = place + 1
        elif token == end:
            if start is None:
                found.append(MalformedCall("a call ends that has not begun"))
            else:
                found.append(parsed_call(text_of(tokens[start:place])))
            start = None
    if start is not None:
        found.append(MalformedCall("a call begins and does not end"))
    return tuple(found)


def outside_calls(tokens: Sequence[int], begin: int, end: int) -> list[int]:
    """The tokens that belong to no call, without the tags; those of a call that does not end are left out."""
    found: list[int] = []
    is_call = False
    for token in tokens:
        if token in (begin, end):
            is_call = token == begin
        elif not is_call:
            found.append(token)
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
