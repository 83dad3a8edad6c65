"""Rows with conversations, in the formats of chat models, as rows of a prompt with `messages` in their metadata.

`messages` (OpenAI, Hugging Face) is a list of {"role", "content"}, with `tool_calls` where the model calls tools;
`conversations` (ShareGPT) is a list of {"from", "value"}. The last message is the assistant's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unirl.types.errors import DataError
from unirl.types.messages import ASSISTANT, MESSAGES

SHARED = "conversations"
_ROLES = {"human": "user", "gpt": ASSISTANT, "function_call": ASSISTANT, "observation": "tool", "system": "system"}
"""ShareGPT's names of roles -> those of chat templates."""

Row = Any  # Any: a decoded JSON value


def with_prompt(value: Mapping[str, Row], where: str) -> Mapping[str, Row]:
    """The row with the first message of its user as the prompt; the row itself if it has no conversation.

    Raises DataError naming the message that is wrong.
    """
    key = next((key for key in (MESSAGES, SHARED) if isinstance(value.get(key), list)), None)
    if key is None or "prompt" in value:
        return value
    said = [_message(each, f"{where}: message {number}") for number, each in enumerate(value[key], start=1)]
    roles = [each["role"] for each in said]
    if not said or roles[-1] != ASSISTANT:
        raise DataError(
            f"{where}: the conversation ends with {roles[-1:] or 'nothing'}; the last message must be the "
            f"{ASSISTANT}'s, which is trained on."
        )
    if "user" not in roles[: roles.index(ASSISTANT)]:
        raise DataError(f"{where}: no message of the user stands before the first one of the {ASSISTANT}.")
    twice = next((n for n in range(1, len(roles)) if roles[n] == roles[n - 1] == ASSISTANT), None)
    if twice is not None:
        raise DataError(f"{where}: messages {twice} and {twice + 1} are both the {ASSISTANT}'s; join them.")
    rest = {name: item for name, item in value.items() if name not in (key, "metadata")}
    given = value.get("metadata")
    if given is not None and not isinstance(given, Mapping):
        raise DataError(f"{where}: metadata is a {type(given).__name__}; write a mapping.")
    kept = ("prompt_id", "media", "images", "audio")
    extra = {name: item for name, item in rest.items() if name not in kept}
    return {
        "prompt": said[roles.index("user")]["content"],
        **{name: item for name, item in rest.items() if name in kept},
        "metadata": {
            **extra,
            **(given or {}),
            MESSAGES: said,
        },
    }


def _message(value: Row, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is a {type(value).__name__}; write {{role, content}}.")
    role = value.get("role") or _ROLES.get(str(value.get("from")), value.get("from"))
    content = value.get("content", value.get("value"))
    calls = value.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} has no role; write {{role, content}}.")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where}: its content is a {type(content).__name__}; write a text.")
    return {"role": role, "content": "\n".join([*([content] if content else []), *(_call(c, where) for c in calls)])}


def _call(value: Row, where: str) -> str:
    """A tool call as most models write it."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call is {{function: {{name, arguments}}}}; got {str(value)[:80]}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{where}: the arguments of {function['name']} are no JSON: {error}") from error
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
