"""Rows of conversations, in the formats of chat models."""

import json

import pytest

from unirl.data.datasets import read_rows
from unirl.types.errors import DataError
from unirl.types.messages import Message, demonstration

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def rows(tmp_path, *values):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return read_rows(path)


def test_a_conversation_is_a_prompt_and_its_messages(tmp_path):
    system = {"role": "system", "content": "be kind"}
    (row,) = rows(tmp_path, {"messages": [system, USER, ANSWER], "metadata": {"answer": "3"}, "prompt_id": "a"})
    assert (row.prompt, row.prompt_id, row.metadata["answer"]) == ("hi", "a", "3")
    assert demonstration(row.prompt, row.metadata) == [
        Message("system", "be kind"),
        Message("user", "hi"),
        Message("assistant", "hello"),
    ]


def test_the_formats_are_one(tmp_path):
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    found = rows(tmp_path, {"messages": [USER, ANSWER]}, shared, {"prompt": "hi", "completion": "hello"})
    said = [demonstration(row.prompt, row.metadata) for row in found]
    assert said[0] == said[1] == said[2] == [Message("user", "hi"), Message("assistant", "hello")]
    assert demonstration("hi", rows(tmp_path, {"prompt": "hi"})[0].metadata) is None


def test_tool_calls_are_written_as_models_write_them(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": "\u00e9"})}}
    calling = {"role": "assistant", "content": "I add.", "tool_calls": [call, call]}
    said = [USER, calling, {**USER, "role": "tool"}, ANSWER]
    (row,) = rows(tmp_path, {"messages": said})
    one = '<tool_call>\n{"name": "add", "arguments": {"a": "\u00e9"}}\n</tool_call>'
    assert row.metadata["messages"][1]["content"] == f"I add.\n{one}\n{one}"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER], r"ends with \['user'\]"),
        ([], "ends with nothing"),
        ([ANSWER], "no message of the user stands before"),
        ([USER, ANSWER, ANSWER], "messages 2 and 3 are both the assistant's"),
        (["hi"], "message 1 is a str"),
        ([{"content": "hi"}, ANSWER], "message 1 has no role"),
        ([{"role": "user", "content": 3}, ANSWER], "message 1: its content is a int|its content is a int"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": ["add"]}], "a tool call is"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}],
            "the arguments of add are no JSON",
        ),
    ],
)
def test_a_wrong_conversation_names_its_file_line_and_message(tmp_path, messages, reason):
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*({reason})"):
        rows(tmp_path, {"messages": [USER, ANSWER]}, {"messages": messages})


def test_a_prompt_beside_messages_stays_the_prompt(tmp_path):
    (row,) = rows(tmp_path, {"prompt": "mine", "messages": [USER, ANSWER]})
    assert row.prompt == "mine" and row.metadata["messages"] == [USER, ANSWER]
