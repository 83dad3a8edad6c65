"""Rows with conversations, in the formats of chat models, as rows of a prompt with `messages` in their metadata.

`messages` (OpenAI, Hugging Face) is a list of {"role", "content"}, with `tool_calls` where the model calls tools;
`conversations` (ShareGPT) is a list of {"from", "value"}. The last message is the assistant's.

Images are `images` of the row, in the order in which messages show them: each says "<image>" where one stands, or has a
list of parts as its content, of which one of the type "image" is one. Or such a part names its file (OpenAI's
`image_url`, Qwen's `image`), and the row has no `images`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from unirl.types.errors import DataError
from unirl.types.messages import ASSISTANT, MESSAGES, SHOWN, USER

SHARED = "conversations"
MARK = "<image>"
"""Stands for an image in a text."""
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
    shown: list[str | None] = []
    said = [_message(each, f"{where}: message {number}", shown) for number, each in enumerate(value[key], start=1)]
    roles = [each["role"] for each in said]
    if not said or roles[-1] != ASSISTANT:
        raise DataError(
            f"{where}: the conversation ends with {roles[-1:] or 'nothing'}; the last message must be the "
            f"{ASSISTANT}'s, which is trained on."
        )
    if USER not in roles[: roles.index(ASSISTANT)]:
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
    listed = next((name for name in ("images", "media") if isinstance(value.get(name), list)), None)
    files = [file for file in shown if file is not None]
    if files and (listed is not None or None in shown):
        raise DataError(
            f"{where}: some images are named in the messages, others are not. Name all of them in the messages, or all "
            "in `images` of the row."
        )
    num_images = len(value[listed]) if listed is not None else len(files)
    if num_images or shown:
        _place_images(said, num_images, where)
    return {
        "prompt": said[roles.index(USER)]["content"],
        **{name: item for name, item in rest.items() if name in kept},
        **({"images": files} if files else {}),
        "metadata": {
            **extra,
            **(given or {}),
            MESSAGES: said,
        },
    }


def _place_images(said: list[dict[str, Row]], num_images: int, where: str) -> None:
    """Write into messages how many images each shows. Raises DataError for more or fewer than the row has."""
    first = next(place for place, each in enumerate(said) if each["role"] == ASSISTANT)
    marks = [0 if each["role"] == ASSISTANT else each["content"].count(MARK) for each in said]
    if not any(marks):
        marks[next(place for place, each in enumerate(said) if each["role"] == USER)] = num_images
    if sum(marks) != num_images:
        raise DataError(
            f"{where}: the row has {num_images} images and its messages {sum(marks)} placeholders ({MARK}, or parts of "
            "the type image). Give one placeholder per image; without any, all images stand before the first message "
            "of the user."
        )
    for place, (each, count) in enumerate(zip(said, marks, strict=True)):
        if count == 0:
            continue
        each[SHOWN] = count
        if each["content"].startswith(MARK * count):
            text = each["content"].removeprefix(MARK * count)
            # A question without words stays a text, since a row needs a prompt.
            each["content"] = text if place > first or text.strip() else each["content"]
        elif place > first and MARK in each["content"]:
            raise DataError(
                f"{where}: message {place + 1} says {MARK} inside its text. Images of a message that follows a turn of "
                f"the {ASSISTANT} stand before its text; write {MARK} first."
            )


def _message(value: Row, where: str, shown: list[str | None]) -> dict[str, Row]:
    """Role and content of a message, with a mark for each of its images; adds to `shown` the
    file of each image among its parts, None where it names none."""
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is a {type(value).__name__}; write {{role, content}}.")
    role = value.get("role") or _ROLES.get(str(value.get("from")), value.get("from"))
    content = value.get("content", value.get("value"))
    calls = value.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} has no role; write {{role, content}}.")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(each, role, f"{where}: part {number}", shown) for number, each in enumerate(content, 1))
    if not isinstance(content, str):
        raise DataError(f"{where}: its content is a {type(content).__name__}; write a text.")
    return {"role": role, "content": "\n".join([*([content] if content else []), *(_call(c, where) for c in calls)])}


def _part(value: Row, role: str, where: str, shown: list[str | None]) -> str:
    """A part of a content as text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return value["text"]
    if kind not in ("image", "image_url"):
        raise DataError(f"{where} must be {{type: text, text}} or {{type: image}}; got {str(value)[:80]}.")
    if role == ASSISTANT:
        raise DataError(f"{where} is an image of the {ASSISTANT}, which is trained to write text alone. Remove it.")
    named = next((item for key in ("image", "image_url", "path", "url") if (item := value.get(key)) is not None), None)
    file = named.get("url") if isinstance(named, Mapping) else named
    if file is None and kind == "image":
        shown.append(None)
        return MARK
    if not isinstance(file, str) or not file or re.match(r"(data|https?):", file):
        raise DataError(
            f"{where}: {str(file)[:80]!r} is no file. Save the image in the folder of the data and write its path."
        )
    shown.append(file)
    return MARK


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
