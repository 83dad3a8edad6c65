"""What a harness asks an OpenAI-shaped endpoint, as the turns of one conversation.

Tokens of a conversation only grow, so a request must repeat what was said before and add to it. What cannot be carried
is refused by name, and its episode has failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.rollout.turns.calls import ToolCall, Turn
from unirl.types.messages import ASSISTANT, Message

_CARRIED = frozenset({"model", "messages", "tools", "stream", "stream_options", "parallel_tool_calls"})
_PLAIN: Mapping[str, Sequence[Any]] = {"tool_choice": ("auto",), "n": (1,)}  # Any: JSON


class NotCarriedError(Exception):
    """A request that is no next turn of its conversation."""


@dataclass(frozen=True)
class Asked:
    """A request: what is new in it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]  # Any: JSON
    system_prompt: str | None = None
    """That of the first request."""


@dataclass(frozen=True)
class _Said:
    """A message as it can be compared: a harness may add keys to it and take others away."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass
class Talk:
    """A conversation as far as it has come."""

    said: list[_Said] = field(default_factory=list)

    def hear(self, body: Mapping[str, Any]) -> Asked:  # Any: JSON
        """What a request adds. Raises NotCarriedError if the model could not answer it as a next turn."""
        others = sorted(
            name
            for name, value in body.items()
            if name not in _CARRIED and value is not None and value not in _PLAIN.get(name, ())
        )
        if others:
            raise NotCarriedError(
                f"the harness asks for {', '.join(others)}; turns are sampled as the recipe's `sampling` says. Leave "
                "it out of the harness and of the task set"
            )
        heard = [_said(message) for message in body["messages"]]
        num_known = len(self.said)
        if heard[:num_known] != self.said or (num_known and len(heard) == num_known):
            raise NotCarriedError(
                f"the harness sends {len(heard)} messages that do not continue the {num_known} before: it shortens, "
                "rewrites or branches the conversation. Choose a harness that only adds to it"
            )
        new = heard[num_known:]
        system = None
        if not num_known:
            system = new[0].text if new and new[0].role == "system" else None
            opening = new if system is None else new[1:]
            if [each.role for each in opening] != ["user"]:
                raise NotCarriedError(
                    f"the task begins with messages of {', '.join(each.role for each in new)}; a prompt is one message "
                    "of the user, under at most one of the system"
                )
        elif strange := sorted({each.role for each in new} - {"user", "tool"}):
            raise NotCarriedError(f"the harness adds messages of {', '.join(strange)} between turns of the model")
        self.said = heard
        told = new if system is None else new[1:]
        tools = tuple(body.get("tools") or ())
        return Asked(tuple(Message(each.role, each.text) for each in told), tools, system)

    def answer(self, turn: Turn, thoughts_end: str | None) -> dict[str, Any]:  # Any: JSON
        """The model's turn as a message of OpenAI's. With a call that is malformed it is all text, as servers do."""
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        is_text = len(calls) < len(turn.calls) or not calls
        text = turn.text if is_text else turn.prose
        message: dict[str, Any] = {"role": ASSISTANT}  # Any: JSON
        if thoughts_end is not None and thoughts_end in text:
            message["reasoning_content"], _, text = text.partition(thoughts_end)
        message["content"] = text if is_text else text.strip() or None
        if not is_text:
            message["tool_calls"] = [
                {
                    "id": f"call_{len(self.said)}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in enumerate(calls)
            ]
        self.said.append(_said(message))
        return message


def _said(message: Mapping[str, Any]) -> _Said:  # Any: JSON
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return _Said(message["role"], _text(message.get("content")), calls)


def _text(content: Any) -> str:  # Any: JSON
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    strange = sorted({part["type"] for part in content} - {"text"})
    if strange:
        raise NotCarriedError(f"a message shows {', '.join(strange)}; only texts are carried")
    return "".join(part["text"] for part in content)


def completion(message: Mapping[str, Any], model: str) -> dict[str, Any]:  # Any: JSON
    """A whole answer of the endpoint. Tokens are counted by the trainer alone, so the usage says 0."""
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "unirl",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": finish}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def events(whole: Mapping[str, Any]) -> bytes:  # Any: JSON
    """The same answer as a stream of one chunk."""
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    chunk = {
        **whole,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
