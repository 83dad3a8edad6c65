"""Rows of conversations, in the formats of chat models."""

import json

import pytest
from PIL import Image

from unirl.data.datasets import read_rows
from unirl.types.errors import ContractError, DataError
from unirl.types.messages import Message, ShownImage, demonstration

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


IMAGE = {"type": "image"}
QUESTION = {"role": "user", "content": [IMAGE, {"type": "text", "text": "what?"}]}
LOOK = {"role": "tool", "content": "<image>closer"}


def with_files(tmp_path, *values):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return rows(tmp_path, *values)


def test_images_are_given_to_the_messages_that_show_them(tmp_path):
    parts = {"messages": [QUESTION, ANSWER, LOOK, ANSWER], "images": ["a.png", "b.png"]}
    named = [IMAGE | {"image": "a.png"}, {"type": "text", "text": "what?"}]
    urls = [{"type": "image_url", "image_url": {"url": "b.png"}}, {"type": "text", "text": "closer"}]
    inside = {"messages": [USER | {"content": named}, ANSWER, {"role": "tool", "content": urls}, ANSWER]}
    shared = {
        "conversations": [
            {"from": "human", "value": "<image>what?"},
            {"from": "gpt", "value": "hello"},
            {"from": "observation", "value": "<image>closer"},
            {"from": "gpt", "value": "hello"},
        ],
        "images": ["a.png", "b.png"],
    }
    found = with_files(tmp_path, parts, inside, shared)
    shown = [ShownImage(1, 1, bytes([level] * 3)) for level in (1, 2)]
    for row in found:
        assert [ref.uri for ref in row.media] == ["a.png", "b.png"] and row.prompt == "what?"
        assert demonstration(row.prompt, row.metadata, shown) == [
            Message("user", "what?", (shown[0],)),
            Message("assistant", "hello"),
            Message("tool", "closer", (shown[1],)),
            Message("assistant", "hello"),
        ]
    with pytest.raises(ContractError, match="the messages of a conversation show 2 images, its row brings 1"):
        demonstration("", found[0].metadata, shown[:1])


def test_images_without_placeholders_are_of_the_first_question_and_places_in_a_question_stay(tmp_path):
    plain = {"messages": [{"role": "system", "content": "look"}, USER, ANSWER], "images": ["a.png", "b.png"]}
    inside = {"messages": [USER | {"content": "is <image> like <image>?"}, ANSWER], "images": ["a.png", "b.png"]}
    given = {"prompt": "hi", "completion": "hello", "images": ["a.png", "b.png"]}
    alone = {"messages": [{"role": "user", "content": [IMAGE, IMAGE]}, ANSWER], "images": ["a.png", "b.png"]}
    shown = (ShownImage(1, 1, b"abc"), ShownImage(1, 1, b"def"))
    said = [demonstration(row.prompt, row.metadata, shown) for row in with_files(tmp_path, plain, inside, given, alone)]
    assert said[0] == [Message("system", "look"), Message("user", "hi", shown), Message("assistant", "hello")]
    assert said[1] == [Message("user", "is <image> like <image>?", shown), Message("assistant", "hello")]
    assert said[2] == [Message("user", "hi", shown), Message("assistant", "hello")]
    assert said[3] == [Message("user", "<image><image>", shown), Message("assistant", "hello")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [QUESTION, ANSWER]}, "the row has 0 images and its messages 1 placeholders"),
        ({"messages": [QUESTION, ANSWER], "images": ["a.png", "b.png"]}, "the row has 2 images and its messages 1"),
        (
            {"messages": [QUESTION, ANSWER, LOOK, ANSWER], "images": ["a.png"]},
            "the row has 1 images and its",
        ),
        ({"messages": [QUESTION, ANSWER], "images": ["c.png"]}, r"the image c\.png does not exist"),
        ({"messages": [QUESTION, ANSWER], "images": ["../a.png"]}, r"the image \.\./a\.png (does not|lies outside)"),
        ({"messages": [QUESTION, ANSWER], "images": ["SISTER/a.png"]}, "lies outside the folder of the data"),
        ({"prompt": "hi", "completion": "x", "images": ["SISTER/a.png"]}, "lies outside the folder of the data"),
        (
            {"messages": [USER, ANSWER, LOOK | {"content": "see <image>"}, ANSWER], "images": ["a.png"]},
            "message 3 says <image> inside its text",
        ),
        (
            {"messages": [QUESTION, ANSWER | {"content": [IMAGE]}], "images": ["a.png"]},
            "message 2: part 1 is an image of the assistant",
        ),
        (
            {"messages": [QUESTION | {"content": [IMAGE | {"image": "a.png"}]}, ANSWER], "images": ["a.png"]},
            "some images are named in the messages, others are not",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "https://x/a.png"}]},
                    ANSWER,
                ]
            },
            "message 1: part 1: 'https://x/a.png' is no file",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWER]}, "part 1 must be {type: text, text}"),
    ],
)
def test_a_wrong_image_of_a_conversation_names_its_file_and_line(tmp_path, row, reason):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "sister").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "sister" / "a.png")
    row = json.loads(json.dumps(row).replace("SISTER", "../sister"))
    with pytest.raises(DataError, match=rf"data\.jsonl:1: .*({reason})"):
        with_files(folder, row)
