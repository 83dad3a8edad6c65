"""Prompt files of every format, the order of rows, and every message about a bad file."""

import json
import os
import re

import pytest
from PIL import Image

from unirl.data.data_source import MultimodalRLDataSource, epoch_order
from unirl.data.datasets import MAX_TEXT_BYTES, PromptRow, read_rows
from unirl.data.media import MediaRef
from unirl.data.rules import unreadable
from unirl.types.errors import DataError
from unirl.types.recipe import Machine


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_text_file_has_one_prompt_a_line_and_skips_blank_ones(tmp_path):
    rows = read_rows(written(tmp_path, "p.txt", "a cat\r\n\n  a dog \n"))
    assert rows == [PromptRow("a cat", "p.txt:0"), PromptRow("a dog", "p.txt:1")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "a caf\u00e9\n"),
        ("p.jsonl", '{"prompt": "a caf\u00e9"}\n'),
        ("p.json", '["a caf\u00e9"]'),
        ("p.csv", "prompt\na caf\u00e9\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt_and_other_encodings_are_named_by_line(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8-sig"))
    assert [row.prompt for row in read_rows(path)] == ["a caf\u00e9"]
    path.write_bytes(b"\n" + text.encode("latin-1"))
    line = 2 + text[: text.index("\u00e9")].count("\n")
    with pytest.raises(DataError, match=rf"{name}:{line}: not UTF-8 text: byte 0xe9\. Save the file as UTF-8\."):
        read_rows(path)


def test_jsonl_takes_prompt_or_caption_ids_metadata_and_extra_keys(tmp_path):
    path = written(
        tmp_path,
        "p.jsonl",
        lines({"prompt": "a", "prompt_id": 7, "metadata": {"k": 1}}, {"caption": "b", "category": "two"}, "c"),
    )
    assert read_rows(path) == [
        PromptRow("a", "7", {"k": 1}),
        PromptRow("b", "p.jsonl:1", {"category": "two"}),
        PromptRow("c", "p.jsonl:2"),
    ]


@pytest.mark.parametrize("value", [["a", {"caption": "b"}], {"prompts": ["a", "b"]}, {"caption": ["a", "b"]}])
def test_json_is_a_list_or_a_mapping_with_one(tmp_path, value):
    rows = read_rows(written(tmp_path, "p.json", json.dumps(value)))
    assert [row.prompt for row in rows] == ["a", "b"]


def test_dataset_folder_reads_like_a_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"caption": ["a", "b"], "category": ["x", None]})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "two")
    assert read_rows(tmp_path / "one") == [PromptRow("a", "one:0", {"category": "x"}), PromptRow("b", "one:1")]
    assert [row.prompt for row in read_rows(tmp_path / "two", "test")] == ["b"]
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\], not None. Set data.split"):
        read_rows(tmp_path / "two")


def test_conditioning_images_of_a_row_are_read(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "cat.png")
    ref = {"modality": "image", "role": "condition", "uri": "cat.png"}
    rows = read_rows(written(tmp_path, "p.jsonl", lines({"prompt": "make it blue", "media": [ref, ref]})))
    assert rows[0].media == (MediaRef("image", "condition", "cat.png"),) * 2


def test_a_picture_of_hundreds_of_millions_of_pixels_is_refused_by_its_head(tmp_path):
    (tmp_path / "huge.ppm").write_bytes(b"P6 20000 20000 255\n")
    with pytest.raises(DataError, match="huge.ppm cannot be read as an image: Image size .400000000 pixels. exceeds"):
        read_rows(written(tmp_path, "p.jsonl", lines({"prompt": "a", "images": ["huge.ppm"]})))


def test_a_video_of_a_row_is_a_folder_of_its_frames_in_the_order_of_their_names(tmp_path):
    (tmp_path / "wave").mkdir()
    for name in ("10.png", "02.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / "wave" / name)
    video = {"modality": "video", "role": "pose", "uri": "wave"}
    (row,) = read_rows(written(tmp_path, "p.jsonl", lines({"prompt": "it waves", "media": [video]})))
    assert row.media == tuple(MediaRef("video", "pose", f"wave/{name}") for name in ("02.png", "10.png"))
    (tmp_path / "wave" / "notes.txt").write_text("not an image")
    with pytest.raises(DataError, match="notes.txt cannot be read as an image"):
        read_rows(tmp_path / "p.jsonl")


def test_csv_rows_are_those_of_json_with_texts_for_values(tmp_path):
    text = (
        "\ufeffprompt, answer ,prompt_id,metadata\r\n"
        '"a cat, ""red""",7,,\r\n'
        "\r\n"
        '"two\r\nlines",,x,\r\n'
        'a dog,,,"{""count"": [1, 2]}"\r\n'
    )
    assert read_rows(written(tmp_path, "p.csv", text)) == [
        PromptRow('a cat, "red"', "p.csv:0", {"answer": "7"}),
        PromptRow("two\nlines", "x"),
        PromptRow("a dog", "p.csv:2", {"count": [1, 2]}),
    ]


def test_pictures_choices_and_scores_of_csv_cells_are_paths_or_json(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "p.png")
    question = 'question,images,answer,choices\nsee?,p.png,1,"[""1"", 2]"\n'
    (row,) = read_rows(written(tmp_path, "one.csv", question))
    assert row.media == (MediaRef("image", "condition", "p.png"),)
    assert (row.prompt, row.metadata["answer"]) == ("see?\nA. 1\nB. 2", "A")
    rated = 'prompt,images,scores\na,"[""p.png"", ""p.png""]","[1, 0]"\n'
    (row,) = read_rows(written(tmp_path, "two.csv", rated))
    assert row.metadata == {"images": ["p.png", "p.png"], "scores": [1, 0]}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.tsv", "a", "p.tsv: unknown format '.tsv'. Use .txt, .jsonl, .json, .csv"),
        ("p.csv", "prompt\n", "p.csv: holds no prompt"),
        ("p.csv", "text\na\n", "p.csv:2: the row has neither `prompt` nor `caption` among ['text']"),
        ("p.csv", "prompt;answer\na;1\n", "p.csv:1: the header 'prompt;answer' is one column. Separate"),
        ("p.csv", "prompt,\na,1\n", "p.csv:1: the header ['prompt', ''] must name every column, each once"),
        ("p.csv", 'prompt,k\n"a\nb",1\na,b,c\n', "p.csv:4: has 3 cells, the header has 2 (prompt, k). Put a cell"),
        ("p.csv", 'prompt\na\n"b\n', "p.csv:3: not CSV: unexpected end of data. Close the quotes"),
        ("p.csv", 'prompt,metadata\na,"{k: 1}"\n', "p.csv:2: metadata is not JSON: Expecting property name"),
        ("p.csv", "prompt,metadata\na,k\n", "p.csv:2: metadata is a str; write a mapping"),
        ("p.txt", " \n", "p.txt: holds no prompt"),
        ("p.jsonl", '"a"\n{"prompt": \n', "p.jsonl:2: not JSON"),
        ("p.jsonl", '"a"\n\n3\n', "p.jsonl:3: a row is a int"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl:1: the row has neither `prompt` nor `caption` among ['text']"),
        ("p.jsonl", '{"prompt": "a", "caption": "b"}\n', "p.jsonl:1: the row has both"),
        ("p.jsonl", '{"prompt": " "}\n', "p.jsonl:1: prompt = ' ' must be a non-empty string"),
        ("p.jsonl", '{"prompt": "a", "prompt_embeds": "x.pt"}\n', "p.jsonl:1: ['prompt_embeds'] hold embeddings"),
        ("p.jsonl", '{"prompt": "a", "metadata": 3}\n', "p.jsonl:1: metadata is a int"),
        ("p.jsonl", '{"prompt": "a", "metadata": {}, "x": 1}\n', "also the keys ['x']; move them into metadata"),
        ("p.jsonl", '{"prompt": "a", "prompt_id": true}\n', "p.jsonl:1: prompt_id = True must be"),
        ("p.jsonl", lines(*[{"prompt": "a", "prompt_id": "x"}] * 2), "rows 1 and 2 both have prompt_id 'x'"),
        ("p.jsonl", '{"prompt": "a", "media": []}\n', "media must be a list of at least one image"),
        ("p.jsonl", '{"prompt": "a", "media": [{"uri": "x"}]}\n', "needs exactly modality, role, uri"),
        (
            "p.jsonl",
            lines({"prompt": "a", "media": [{"modality": "smell", "role": "condition", "uri": "x"}]}),
            "p.jsonl:1: image 1 is (smell, condition); (modality, role) is one of",
        ),
        (
            "p.jsonl",
            lines({"prompt": "a", "media": [{"modality": "video", "role": "pose", "uri": "x"}]}),
            "p.jsonl:1: the video x is no folder of images",
        ),
        (
            "p.jsonl",
            lines("a", {"prompt": "a", "media": [{"modality": "image", "role": "condition", "uri": "p.png"}]}),
            "row 1 has no media while 1 other rows do. Split the file",
        ),
        ("p.json", "[1,\n}", "p.json:2: not JSON"),
        ("p.json", "[" * 100_000 + "]" * 100_000, "p.json: not JSON of rows: it nests too deeply"),
        ("p.jsonl", "[" * 100_000 + "]" * 100_000, "p.jsonl:1: not JSON of a row: it nests too deeply"),
        ("p.jsonl", '{"prompt": "a \\ud800"}\n', "p.jsonl:1: prompt = 'a \\ud800' holds half of a surrogate pair"),
        ("p.jsonl", '{"prompt": "a", "images": ["a\\u0000.png"]}\n', "p.jsonl:1: the path 'a\\x00.png' holds a NUL"),
        ("p.json", '{"x": 1}', "needs its prompts as one list under one of prompts"),
        ("p.json", "3", "p.json:1: holds a int; write a list"),
        ("p.json", "", "p.json: holds no prompt"),
        ("p.json", '["a", {}]', "p.json:row 2: the row has neither"),
    ],
)
def test_a_bad_file_is_named_with_its_line_and_the_fix(tmp_path, name, text, message):
    Image.new("RGB", (6, 4)).save(tmp_path / "p.png")
    with pytest.raises(DataError, match=re.escape(message)):
        read_rows(written(tmp_path, name, text))


def test_what_never_ends_is_no_file_of_prompts(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)  # takes no room
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name, message in (("pipe", "no regular file"), ("zero", "no regular file"), ("large", "at most 536870912")):
        with pytest.raises(DataError, match=message):
            read_rows(tmp_path / f"{name}.txt")
        assert message in str(unreadable("data.path", str(tmp_path / f"{name}.txt"), Machine(1, 0)))


def test_missing_file_wrong_folder_and_needless_split_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such prompt file or dataset folder. Set data.path"):
        read_rows(tmp_path / "none.txt")
    with pytest.raises(DataError, match="not a Hugging Face dataset folder"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match="split = 'train' means something for a dataset folder only"):
        read_rows(written(tmp_path, "p.txt", "a"), "train")


def source(folder, text="a\nb\nc\nd\ne\n", **options):
    return MultimodalRLDataSource(str(written(folder, "p.txt", text)), **options)


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path):
    data = source(tmp_path, seed=3)
    epochs = ["".join(row.prompt for row in data.next(5)) for _ in range(4)]
    assert all(sorted(epoch) == list("abcde") for epoch in epochs)
    assert len(set(epochs)) > 1 and data.epoch == 4
    assert len(data) == 5


def test_order_is_pinned_so_that_no_library_changes_it():
    assert epoch_order(6, seed=0, epoch=0) == [2, 5, 3, 4, 0, 1]
    assert epoch_order(6, seed=0, epoch=1) == [3, 1, 5, 4, 0, 2]
    assert epoch_order(6, seed=1, epoch=0) == [2, 0, 5, 4, 1, 3]


def test_batches_run_over_the_end_of_an_epoch(tmp_path):
    data = source(tmp_path, shuffle=False)
    assert [row.prompt for row in data.next(7)] == list("abcdeab")


def test_any_cut_into_batches_and_any_resume_gives_the_same_order(tmp_path):
    whole = [row.prompt for row in source(tmp_path, seed=1).next(17)]
    first = source(tmp_path, seed=1)
    taken = [row.prompt for row in first.next(4) + first.next(3)]
    second = source(tmp_path, seed=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken + [row.prompt for row in second.next(10)] == whole


def test_resuming_with_other_rows_seed_or_shuffling_is_an_error(tmp_path):
    state = source(tmp_path, seed=1).state_dict()
    with pytest.raises(DataError, match="its rows have changed since the checkpoint was written"):
        source(tmp_path, "a\nb\n", seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="written with seed = 1, this run has 2"):
        source(tmp_path, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="written with shuffle = True"):
        source(tmp_path, seed=1, shuffle=False).load_state_dict(state)
