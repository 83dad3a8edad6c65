"""Sets of prompts: conversion of what is published, generated sets, and files that are wrong or in the way."""

import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import wave
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
from PIL import Image

from unirl.data.datasets import read_rows
from unirl.data.pairs import read_pairs
from unirl.data.rules import unreadable
from unirl.datasets import characters, composed, controls, geneval, heard, motion, ocr, styles, writing
from unirl.datasets.canny import canny
from unirl.datasets.catalog import SETS, command_for, set_of
from unirl.datasets.github import GitHubRepository
from unirl.datasets.preparing import prepare
from unirl.datasets.records import PublishedFile
from unirl.reward.local.judges.dpg import dpg_score
from unirl.types.errors import DataError
from unirl.types.recipe import Machine

from .published_sets import (
    PUBLISHED,
    dapo_row,
    edit_rows,
    framed,
    geo3k_archive,
    geo3k_problem,
    publish,
    wise_rows,
    write_table,
    write_text,
)

GENERATED = sorted(name for name, each in SETS.items() if each.is_generated)


@pytest.fixture
def made(tmp_path):
    """Makes a set from tiny files of its published layout; returns its folder."""

    def make(name, **options):
        given = publish(name, tmp_path / f"{name}-published")
        prepare(SETS[name], tmp_path / name, given=given, is_partial=True, **options)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """generated(name) -> the folder of a generated set, made once. Read-only."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("generated") / name
        prepare(SETS[name], folder)
        return folder

    return make


@pytest.fixture(scope="module")
def geneval_rows():
    return [row for held_out in (False, True) for row in geneval.rows(held_out=held_out)]


def prompts(path):
    return [row.prompt for row in read_rows(path)]


def asked(path):
    """Each row's prompt with the recordings it is about."""
    return [
        (row.prompt, *(Path(each.place()[0]).read_bytes() for each in row.media if each.modality == "audio"))
        for row in read_rows(path)
    ]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is published --------------------------------------------------------------------------------------------------


def test_every_set_that_is_not_generated_has_a_layout_here():
    assert sorted(PUBLISHED) == sorted(name for name in SETS if name not in GENERATED)


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_files_that_a_data_source_reads_and_says_where_it_is_from(name, made, generated):
    folder = generated(name) if name in GENERATED else made(name)
    manifest = json.loads((folder / "SOURCE.json").read_text())
    assert manifest["set"] == name
    for output in SETS[name].outputs:
        assert len(read_rows(folder / output.file)) == manifest["files"][output.file]["rows"] > 0
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", SETS)
def test_prompts_bring_the_media_that_their_set_names(name, made, generated):
    folder = generated(name) if name in GENERATED else made(name)
    for output in SETS[name].outputs:
        for row in read_rows(folder / output.file):
            assert {(each.modality, each.role) for each in row.media} == set(SETS[name].media)


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_the_same_bytes_each_time(name, made, generated, tmp_path):
    first = generated(name) if name in GENERATED else made(name)
    given = None if name in GENERATED else tmp_path / f"{name}-published"
    prepare(SETS[name], tmp_path / "again", given=given, is_partial=given is not None)
    assert contents(first) == contents(tmp_path / "again") != {}


def test_pickscore_is_copied_without_repeats(made):
    assert prompts(made("pickscore") / "train.txt") == ["a cat", "a dog", "música, 猫"]


def test_hpdv2_holds_out_a_hundred_of_each_style_and_trains_on_none_of_the_benchmark(made):
    folder = made("hpdv2")
    held_out = prompts(folder / "test.txt")
    assert prompts(folder / "train.txt") == ["x", "y"]
    assert [sum(text.startswith(style) for text in held_out) for style in ("anime", "photo")] == [100, 100]
    assert len(set(held_out)) == 400


def test_wise_rows_have_what_the_scorer_reads_and_keep_their_split_where_others_go(made, tmp_path):
    folder = made("wise")
    rows = read_rows(folder / "train.jsonl")
    assert rows[0].metadata == {
        "explanation": rows[0].prompt.replace("cultural_common_sense", "it means"),
        "category": "cultural_common_sense",
        "subcategory": "sub",
    }
    before = {split: set(prompts(folder / f"{split}.jsonl")) for split in ("train", "test")}
    assert not before["train"] & before["test"] and len(before["train"] | before["test"]) == 120
    half = tmp_path / "half"
    for name in ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science"):
        write_text(half / f"data/{name}.json", json.dumps(wise_rows(name)[::-2]))
    prepare(SETS["wise"], tmp_path / "again", given=half, is_partial=True)
    for split, texts in before.items():
        assert set(prompts(tmp_path / f"again/{split}.jsonl")) <= texts


def test_preferences_are_chosen_first_without_ties_and_of_one_size(made):
    folder = made("preferences")
    first, second = read_pairs(folder / "train.jsonl", size=(512, 512))
    assert [row.prompt for row in (first, second)] == ["cat 0", "cat 1"]
    reds = [
        [numpy.asarray(Image.open(path))[5, 5, 0] > 128 for path in row.metadata["images"]] for row in (first, second)
    ]
    assert reds == [[True, False], [False, True]]
    record = json.loads((folder / "SOURCE.json").read_text())["files"]["train.jsonl"]
    assert record["pictures"] == 2, "the same image is one file"


def test_dapo_math_leaves_out_repeats_and_problems_with_two_answers(made):
    rows = read_rows(made("dapo_math") / "train.jsonl")
    assert [(row.prompt, row.metadata) for row in rows] == [
        ("Solve.\n\n1+1", {"answer": "2"}),
        ("Solve.\n\n2+2", {"answer": "4"}),
    ]


def test_aime_answers_are_text(made):
    (row,) = read_rows(made("aime24") / "test.jsonl")
    assert (row.prompt, row.metadata) == ("Find x.", {"answer": "204"})


def test_composed_prompts_say_what_their_questions_ask():
    for row in composed.rows(held_out=True):
        listed, placed = row["prompt"].rsplit(", ", 1)
        num = int(row["category"][0])
        assert len(row["vqa_list"]) == 2 * num + 1 and len(row["questions"]) == 3 * num + 1
        for question, answer in row["vqa_list"]:
            words = question.rstrip("?").split()
            if question.startswith("How many") and answer != "one":
                assert f"{answer} " in listed and " ".join(words[2:-4]) in listed
            if answer == "Yes" and question != row["vqa_list"][-1][0]:
                assert words[-1] in listed.split()
        assert placed in row["vqa_list"][-1][0] and row["questions"][-1]["question"] == row["vqa_list"][-1][0]
        ids = [each["id"] for each in row["questions"]]
        answers = dict.fromkeys(ids, True)
        parents = {each["id"]: each["parents"] for each in row["questions"]}
        assert dpg_score(answers, parents) == 1
        # Without the first object, its number, its colour and its place count as no too.
        assert dpg_score({**answers, 1: False}, parents) == pytest.approx((len(ids) - 4) / len(ids))


def test_gsm8k_answers_are_the_number_after_the_marker(made):
    for split in ("train", "test"):
        (row,) = read_rows(made("gsm8k") / f"{split}.jsonl")
        assert (row.prompt, row.metadata) == (f"How many clips? ({split})", {"answer": "1024"})


def test_math_answers_are_what_the_solution_boxes_last(made):
    first, second = read_rows(made("math") / "train.jsonl")
    assert first.prompt == "Find it by algebra." and second.metadata["category"] == "geometry"
    assert [row.metadata["answer"] for row in (first, second)] == [r"\frac{1}{2}", "3"]


def test_geo3k_rows_are_multiple_choice_with_their_diagram_in_the_order_of_their_numbers(made):
    first, second = read_rows(made("geo3k") / "train.parquet")
    assert first.prompt == "Find $y$.\nA. 1\nB. 2\nC. 3\nD. 4"
    assert [row.metadata["answer"] for row in (first, second)] == ["A", "C"]
    assert [len(row.media) for row in (first, second)] == [1, 1] and first.media[0].data != second.media[0].data


def test_edits_are_in_english_and_no_picture_is_on_both_sides(made):
    folder = made("image_edit")
    rows = {split: read_rows(folder / f"{split}.parquet") for split in ("train", "test")}
    assert sum(map(len, rows.values())) == 60
    assert {row.prompt.split()[0] for row in rows["train"]} == {"make", "remove"}
    pictures = {split: {row.media[0].data for row in each} for split, each in rows.items()}
    assert pictures["train"] and pictures["test"] and not pictures["train"] & pictures["test"]


def test_motions_of_a_picture_differ(made):
    rows = read_rows(made("picture_motion") / "train.parquet")
    by_picture = {}
    for row in rows:
        by_picture.setdefault(row.media[0].data, []).append(row.metadata["category"])
    assert all(len(set(each)) == 3 for each in by_picture.values())


def test_what_is_given_of_a_picture_is_the_preferred_one_with_a_hole_or_its_edges(made):
    holes, edges = made("holes"), made("edges")
    assert prompts(holes / "train.jsonl") == prompts(edges / "train.jsonl") == ["cat 24", "cat 26"]
    assert prompts(holes / "test.jsonl") == ["cat 25", "cat 27"]
    colours = []
    for row in read_rows(holes / "train.jsonl"):
        assert [(ref.modality, ref.role) for ref in row.media] == [("image", "condition"), ("image", "mask")]
        shown, mask = (numpy.asarray(Image.open(ref.place()[0]).convert("RGB")) for ref in row.media)
        assert shown.shape == mask.shape == (512, 512, 3) and set(numpy.unique(mask)) == {0, 255}
        colours.append("red" if shown[256, 256, 0] > 128 else "blue")
    assert colours == ["red", "blue"]
    for row in read_rows(edges / "train.jsonl"):
        (ref,) = row.media
        lines = numpy.asarray(Image.open(ref.place()[0]).convert("L"))
        assert set(numpy.unique(lines)) == {0, 255} and lines[256, 256] == 0
        assert lines[256, 112:144].any() and lines[112:144, 256].any(), "the sides of the inner square"


def own_pictures(folder):
    """A prompt file of images: one lies on its side, as a camera writes it, and one row means a part of another."""
    folder.mkdir()
    canvas = Image.new("RGB", (40, 20), "red")
    canvas.paste("blue", (20, 0, 40, 20))
    canvas.save(folder / "plain.png")
    turned = Image.Exif()
    turned[0x0112] = 3
    canvas.save(folder / "turned.jpg", exif=turned, quality=95)
    names = ("plain.png#xywh=0,0,20,20", "plain.png#xywh=20,0,20,20", "turned.jpg#xywh=0,0,20,20")
    rows = [{"prompt": f"cat {number}", "images": [name]} for number, name in zip((24, 25, 26), names, strict=True)]
    write_text(folder / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


def test_holes_are_made_in_pictures_of_ones_own(tmp_path):
    given = own_pictures(tmp_path / "mine")
    prepared = prepare(SETS["holes"], tmp_path / "holes", given=given)
    assert prepared.files == (("train.jsonl", 2), ("test.jsonl", 1))
    shown = {}
    for split in ("train", "test"):
        for row in read_rows(tmp_path / f"holes/{split}.jsonl"):
            shown[row.prompt] = numpy.asarray(Image.open(row.media[0].place()[0]))[256, 256].argmax()
    assert shown == {"cat 24": 0, "cat 25": 2, "cat 26": 2}
    source = json.loads((tmp_path / "holes/SOURCE.json").read_text())["files"]["train.jsonl"]["source"]
    assert source == {"version": 1, "own": hashlib.sha256(given.read_bytes()).hexdigest()}
    assert not prepare(SETS["holes"], tmp_path / "holes", given=given).is_new
    assert not prepare(SETS["holes"], tmp_path / "holes").is_new, "what is there is not fetched"


@pytest.mark.parametrize("kind", controls.HOLES_IN)
def test_a_hole_is_where_its_key_says_and_neither_small_nor_all(kind):
    masks = [numpy.asarray(controls.hole(kind, f"picture {number}")) for number in range(20)]
    again = [numpy.asarray(controls.hole(kind, f"picture {number}")) for number in range(20)]
    assert numpy.array_equal(masks, again) and len({mask.tobytes() for mask in masks}) == 20
    assert all(0.08 <= (mask == 255).mean() <= 0.65 and set(numpy.unique(mask)) == {0, 255} for mask in masks)


# Edges --------------------------------------------------------------------------------------------------------------


def test_edges_of_a_step_are_one_thin_line():
    pixels = numpy.zeros((5, 6, 3), numpy.uint8)
    pixels[:, 3:] = 60
    expected = numpy.zeros((5, 6), bool)
    expected[:, 2] = True  # 4 * 60 on both sides of the step, of which the left one is kept
    assert numpy.array_equal(canny(pixels), expected)
    assert not canny(pixels // 3).any(), "4 * 20 is below the lower threshold"


def test_a_weak_edge_is_kept_where_a_strong_one_goes_on():
    pixels = numpy.zeros((9, 6, 3), numpy.uint8)
    pixels[:, 3:] = 30  # 120: weak
    assert not canny(pixels).any()
    pixels[:2, 3:] = 60  # 240: strong
    assert canny(pixels)[8].any()


@pytest.mark.parametrize("seed", range(6))
def test_edges_are_those_of_opencv(seed):
    cv2 = pytest.importorskip("cv2")
    random = numpy.random.default_rng(seed)
    small = random.integers(0, 256, (12, 16, 3), dtype=numpy.uint8)
    for pixels in (small, cv2.resize(small, (150, 111)), cv2.GaussianBlur(cv2.resize(small, (90, 70)), (0, 0), 2.0)):
        for low, high in ((100, 200), (20, 60)):
            assert numpy.array_equal(canny(pixels, low, high), cv2.Canny(pixels, low, high) > 0)


# Generated ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_generated_splits_have_the_promised_rows_and_nothing_in_common(name, generated):
    splits = [asked(generated(name) / output.file) for output in SETS[name].outputs]
    assert [len(each) for each in splits] == [output.num_rows for output in SETS[name].outputs]
    assert len(set(splits[0]) | set(splits[1])) == sum(map(len, splits)), "nothing is asked twice"


def test_held_out_words_occur_in_no_training_text():
    def words(held_out):
        rows = [row for row in ocr.rows(held_out=held_out) if row["category"] != "number"]
        return {word for row in rows for word in row["text"].lower().split()}

    trained, held_out = words(False), words(True)
    assert trained | held_out <= set(ocr.WORDS) and len(held_out) > 10 and not trained & held_out
    assert {len(word) for word in trained} >= set(range(2, 14))


def test_held_out_numbers_occur_in_no_training_text():
    def numbers(held_out):
        texts = [row["text"] for row in ocr.rows(held_out=held_out) if row["category"] == "number"]
        return {text if ":" in text else "".join(filter(str.isdigit, text)) for text in texts}

    assert not numbers(False) & numbers(True)


def test_a_prompt_of_words_quotes_its_text_and_nothing_else():
    for row in ocr.rows(held_out=False):
        assert row["prompt"].split('"')[1::2] == [row["text"]]


def test_held_out_motion_pairs_a_subject_and_an_action_as_no_training_prompt_does():
    trained, held_out = (
        {(row["subject"], row["action"]) for row in motion.rows(held_out=held_out)} for held_out in (False, True)
    )
    assert not trained & held_out
    assert {row["category"] for row in motion.rows(held_out=True)} == {kind.name for kind in motion.KINDS}


def test_held_out_styles_pair_a_subject_and_a_style_as_no_training_prompt_does():
    trained, held_out = (list(styles.rows(held_out=held_out)) for held_out in (False, True))
    pairs = [{(row["subject"], row["appearance_style"]) for row in rows} for rows in (trained, held_out)]
    assert not pairs[0] & pairs[1]
    for rows in (trained, held_out):
        assert {row["appearance_style"] for row in rows} == set(styles.STYLES)
        assert all(row["prompt"].endswith(f", {row['appearance_style']}") for row in rows)


def test_beeps_sound_as_their_row_says():
    rows = [row for held_out in (False, True) for row in heard.rows(held_out=held_out)]
    recordings = [row["media"][0].content.data for row in rows]
    assert len(set(recordings)) == len(rows)
    for row, recording in zip(rows, recordings, strict=True):
        with wave.open(io.BytesIO(recording)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (heard.SAMPLE_RATE, 1, 2)
            samples = numpy.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(float)
        beeps = beeps_of(samples, heard.SAMPLE_RATE)
        assert row["answer"] == judged(row["question"], beeps), (row, beeps)


def beeps_of(samples, rate):
    """(hertz, seconds) of each stretch of sound between silences of 50 ms, by its zero crossings."""
    loud = numpy.flatnonzero(numpy.abs(samples) > 0)
    ends = numpy.flatnonzero(numpy.diff(loud) > 0.05 * rate)
    stretches = [samples[each[0] : each[-1] + 1] for each in numpy.split(loud, ends + 1)]
    return [
        (numpy.count_nonzero(numpy.diff(numpy.sign(each)) > 0) * rate / len(each), len(each) / rate)
        for each in stretches
    ]


def judged(question, beeps):
    if question == "How many beeps are there?":
        return str(len(beeps))
    first, second = (each[question == "Which beep is longer?"] for each in beeps)
    return "the second" if second > first else "the first"


def test_characters_follow_a_pose_and_a_face_that_move():
    for row in itertools.islice(characters.rows(held_out=True), 4):
        reference, pose, face = row["media"]
        assert (reference.role, pose.role, face.role) == ("condition", "pose", "face")
        for video, fewest in ((pose.content, 5), (face.content, 2)):
            assert len(video) == characters.NUM_FRAMES and len({frame.data for frame in video}) >= fewest
    assert len({person.words for person in characters.people()}) == 24


@pytest.mark.parametrize("motion", characters.MOTIONS)
def test_a_motion_keeps_the_length_of_limbs_a_foot_on_the_ground_and_all_in_the_picture(motion):
    def length(joints, first, second):
        return math.dist(joints[first], joints[second])

    swings = {**characters.REST, **characters.MOTIONS[motion]}
    rest = characters.joints({name: swing.mean for name, swing in characters.REST.items()})
    seen = []
    for frame in range(characters.NUM_FRAMES):
        joints = characters.joints({name: swing.at(frame / characters.NUM_FRAMES) for name, swing in swings.items()})
        seen.append(joints)
        for first, second, _ in characters.LIMBS:
            if second not in ("right hip", "left hip"):  # a trunk that leans
                assert length(joints, first, second) == pytest.approx(length(rest, first, second))
        feet = [joints[f"{side} ankle"][1] for side in ("right", "left")]
        assert max(feet) == pytest.approx(characters.GROUND)
        assert joints["right wrist"][0] < joints["left wrist"][0], "arms do not cross"
        assert all(0 < x * characters.HEIGHT < characters.WIDTH and 0 < y < 1 for x, y in joints.values())
    assert max(math.dist(a[name], b[name]) for a, b in itertools.pairwise(seen) for name in a) < 0.2, "no jump"


def test_a_video_is_written_once_and_read_back_in_its_order(tmp_path):
    prepare(SETS["characters"], tmp_path / "characters", split="test")
    folder = tmp_path / "characters/test-pictures"
    rows = read_rows(tmp_path / "characters/test.jsonl")
    videos = {ref.uri.rsplit("/", 1)[0] for row in rows for ref in row.media if ref.modality == "video"}
    assert len(videos) == sum(path.is_dir() for path in folder.iterdir()) <= len(characters.MOTIONS) + 4
    poses = [ref for ref in rows[0].media if ref.role == "pose"]
    frames = characters.pose_video(rows[0].metadata["category"])
    assert [Path(ref.place()[0]).read_bytes() for ref in poses] == [frame.data for frame in frames]
    (folder / Path(poses[3].uri).relative_to(folder.name)).write_bytes(b"broken")
    with pytest.raises(DataError, match=r"test\.jsonl: is no longer as it was made"):
        prepare(SETS["characters"], tmp_path / "characters", split="test")


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a photo of an umbrella", {"include": [{"class": "umbrella", "count": 1}]}),
        (
            "a photo of three buses",
            {"include": [{"class": "bus", "count": 3}], "exclude": [{"class": "bus", "count": 4}]},
        ),
        (
            "a photo of two people",
            {"include": [{"class": "person", "count": 2}], "exclude": [{"class": "person", "count": 3}]},
        ),
        ("a photo of an orange fork", {"include": [{"class": "fork", "count": 1, "color": "orange"}]}),
    ],
)
def test_geneval_prompts_say_what_their_clauses_ask(geneval_rows, prompt, asked):
    row = next(row for row in geneval_rows if row["prompt"] == prompt)
    assert {key: row[key] for key in ("include", "exclude") if key in row} == asked


def test_a_position_is_seen_from_the_object_that_is_named_second(geneval_rows):
    for row in (row for row in geneval_rows if row["tag"] == "position"):
        seen_from, placed = row["include"]
        relation, index = placed["position"]
        assert index == 0
        words = row["prompt"].removeprefix("a photo of ").split(f" {relation} ")
        names = [each.removeprefix("a ").removeprefix("an ") for each in words]
        assert names == [placed["class"], seen_from["class"]]


# What is there already ----------------------------------------------------------------------------------------------


def test_what_is_there_is_verified_and_not_made_again(made, tmp_path):
    folder = made("pickscore")
    assert not prepare(SETS["pickscore"], folder, is_partial=True).is_new
    again = prepare(SETS["pickscore"], folder, given=tmp_path / "pickscore-published", is_partial=True)
    assert not again.is_new and dict(again.files) == {"train.txt": 3, "test.txt": 2}


def test_a_file_that_was_changed_is_refused_and_then_replaced(tmp_path):
    folder = tmp_path / "motion"
    prepare(SETS["motion"], folder)
    before = contents(folder)
    with (folder / "train.jsonl").open("a") as file:
        file.write('"more"\n')
    with pytest.raises(DataError, match=r"train\.jsonl: is no longer as it was made .*--overwrite"):
        prepare(SETS["motion"], folder)
    assert prepare(SETS["motion"], folder, overwrite=True).is_new
    assert contents(folder) == before


def test_files_of_somebody_else_are_refused_before_anything_is_made(tmp_path):
    folder = tmp_path / "ocr"
    write_text(folder / "test.jsonl", '"mine"\n')
    with pytest.raises(DataError, match=r"test\.jsonl: is there already .*--out.*--overwrite"):
        prepare(SETS["ocr"], folder)
    assert contents(folder) == {Path("test.jsonl"): b'"mine"\n'}


def test_pictures_of_somebody_else_are_not_replaced(made, tmp_path):
    write_text(tmp_path / "preferences/train-pictures/mine.jpg", "mine")
    with pytest.raises(DataError, match="is there already"):
        made("preferences")
    assert (tmp_path / "preferences/train-pictures/mine.jpg").exists()


def test_other_rows_are_refused_without_overwrite(made, tmp_path):
    folder = made("pickscore")
    other = publish("pickscore", tmp_path / "other")
    write_text(other / "dataset/pickscore/train.txt", "a fox\n")
    with pytest.raises(DataError, match=r"train\.txt: what would be made now has other rows"):
        prepare(SETS["pickscore"], folder, given=other, is_partial=True)
    prepare(SETS["pickscore"], folder, given=other, is_partial=True, overwrite=True)
    assert prompts(folder / "train.txt") == ["a fox"]


def test_a_part_is_not_taken_for_the_whole(made, monkeypatch):
    folder = made("pickscore")
    monkeypatch.setattr(GitHubRepository, "url", lambda self, file: "file:///nowhere/at/all")
    with pytest.raises(DataError, match="cannot be downloaded here"):
        prepare(SETS["pickscore"], folder)


def test_one_split_after_the_other_is_both(made, tmp_path):
    folder = made("pickscore", split="test")
    assert sorted(path.name for path in folder.iterdir()) == ["SOURCE.json", "test.txt"]
    made("pickscore", split="train")
    whole = tmp_path / "whole"
    prepare(SETS["pickscore"], whole, given=tmp_path / "pickscore-published", is_partial=True)
    assert contents(folder) == contents(whole)


def test_pictures_that_change_are_noticed_and_replaced(made, tmp_path):
    folder = made("preferences")
    next((folder / "train-pictures").iterdir()).write_bytes(b"broken")
    with pytest.raises(DataError, match="is no longer as it was made"):
        made("preferences")
    made("preferences", overwrite=True)
    assert len(read_pairs(folder / "train.jsonl", size=(512, 512))) == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing_half(tmp_path, monkeypatch, there):
    folder = tmp_path / "datasets" / "motion"
    if there:
        prepare(SETS["motion"], folder)
    before = contents(tmp_path)
    lines = iter(range(10))

    def line_of_a_full_disk(row, path):
        if next(lines, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "{}"

    monkeypatch.setattr(writing, "_line", line_of_a_full_disk)
    with pytest.raises(DataError, match="the disk is full: .*motion could not be made, and nothing half was left"):
        prepare(SETS["motion"], folder, overwrite=there)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []
    assert (tmp_path / "datasets").exists() == there


# Wrong sources ------------------------------------------------------------------------------------------------------


def test_fewer_rows_than_published_are_refused(tmp_path):
    given = publish("aime24", tmp_path / "published")
    with pytest.raises(DataError, match=r"has 1 rows, aime_2024_problems\.parquet is published with 30.*--partial"):
        prepare(SETS["aime24"], tmp_path / "aime24", given=given)
    assert not (tmp_path / "aime24").exists()


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path):
    given = publish("pickscore", tmp_path / "published")
    with pytest.raises(DataError, match=r"test\.txt: is not dataset/pickscore/test\.txt as it is published \(sha256"):
        prepare(SETS["pickscore"], tmp_path / "pickscore", given=given)


def broken_table(folder):
    write_text(folder / "aime_2024_problems.parquet", "not a table")


def other_table(folder):
    write_table(folder / "aime_2024_problems.parquet", [{"question": "1+1", "answer": "2"}])


def no_answer(folder):
    write_table(folder / "aime_2024_problems.parquet", [{"Problem": "1+1", "Answer": None}])


def cut_table(folder):
    publish("dapo_math", folder)
    path = folder / "data/dapo-math-17k.parquet"
    path.write_bytes(path.read_bytes()[:-40])


def no_truth(folder):
    write_table(folder / "data/dapo-math-17k.parquet", [dapo_row("1+1", None) | {"reward_model": {"style": "rule"}}])


def no_user(folder):
    row = dapo_row("1+1", "2") | {"prompt": [{"content": "x", "role": "system"}]}
    write_table(folder / "data/dapo-math-17k.parquet", [row])


def folder_for_file(folder):
    publish("pickscore", folder)
    (folder / "dataset/pickscore/train.txt").unlink()
    (folder / "dataset/pickscore/train.txt").mkdir()


def not_utf8(folder):
    publish("pickscore", folder)
    (folder / "dataset/pickscore/train.txt").write_bytes(b"a cat\n\xff\xfe\n")


def empty_lines(folder):
    publish("pickscore", folder)
    write_text(folder / "dataset/pickscore/train.txt", "\n\n")


def cut_json(folder):
    publish("hpdv2", folder)
    write_text(folder / "train.json", '[{"prompt": "x"}, {"pro')


def no_prompt(folder):
    publish("hpdv2", folder)
    write_text(folder / "train.json", '[{"caption": "x"}]')


def no_explanation(folder):
    publish("wise", folder)
    write_text(folder / "data/natural_science.json", json.dumps([{"Prompt": "x", "Category": "y"}]))


def no_archive(folder):
    publish("geo3k", folder)
    write_text(folder / "data/geometry3k/train.zip", "not a zip")


def no_choices(folder):
    publish("geo3k", folder)
    problem = geo3k_problem()
    del problem["choices"]
    geo3k_archive(folder / "data/geometry3k/train.zip", {"3": problem})


def wrong_letter(folder):
    publish("geo3k", folder)
    geo3k_archive(folder / "data/geometry3k/train.zip", {"3": geo3k_problem(answer="E")})


def broken_picture(folder):
    row = {"caption": "a cat", "jpg_0": b"\xff\xd8broken", "jpg_1": b"", "label_0": 1, "label_1": 0}
    write_table(folder / "data/train-00000-of-00645.parquet", [row])


def no_picture(folder):
    rows = [row | {"input_image_raw": None} for row in edit_rows(2)]
    write_table(folder / "data/train.parquet", rows)


def unmarked(folder):
    for split in ("train", "test"):
        rows = [{"question": "How many?", "answer": "24 clips"}]
        write_table(folder / f"main/{split}-00000-of-00001.parquet", rows)


def unboxed(folder):
    row = {"problem": "Find x.", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{}$."}
    write_table(folder / "algebra/train-00000-of-00001.parquet", [row])


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("gsm8k", unmarked, r"row 1: answer = \.\.\.'24 clips' does not end with #### and a number"),
        ("math", unboxed, r"row 1: the solution .* boxes no answer"),
        ("aime24", broken_table, r"problems\.parquet: cannot be read as parquet: .*Fetch the file again"),
        ("aime24", other_table, r"has no column Problem, Answer; its columns are question, answer"),
        ("aime24", no_answer, r"row 1: needs a Problem and an Answer"),
        ("dapo_math", cut_table, r"cannot be read as parquet"),
        ("dapo_math", no_truth, r"row 1: reward_model = .* has no ground_truth"),
        ("dapo_math", no_user, r"row 1: prompt = .* must have one turn of the user"),
        ("pickscore", folder_for_file, r"is a folder where the file dataset/pickscore/train\.txt is meant"),
        ("pickscore", not_utf8, r"train\.txt:2: not UTF-8"),
        ("pickscore", empty_lines, r"train\.txt: its sources give no row"),
        ("hpdv2", cut_json, r"train\.json:1: not JSON"),
        ("hpdv2", no_prompt, r"row 1: the row has no prompt; it has caption"),
        ("wise", no_explanation, r"row 1: the row has no Explanation, Subcategory"),
        ("geo3k", no_archive, r"train\.zip: cannot be read as zip"),
        ("geo3k", no_choices, r"train/3/data\.json: the row has no choices"),
        ("geo3k", wrong_letter, r"answer = 'E' must be a letter of A, B, C, D"),
        ("preferences", broken_picture, r"row 1: jpg_0 cannot be read as an image"),
        ("image_edit", no_picture, r"row 1: input_image_raw holds no image"),
    ],
)
def test_a_wrong_source_is_named_and_leaves_nothing(tmp_path, name, spoil, message):
    spoil(tmp_path / "published")
    with pytest.raises(DataError, match=message):
        prepare(SETS[name], tmp_path / "out" / name, given=tmp_path / "published", is_partial=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("aime24", "nowhere", "there is no such file or folder"),
        ("aime24", "folder", r"has no aime_2024_problems\.parquet, neither at that path nor by that name"),
        ("aime24", "file.csv", r"is no \.parquet file; aime24 is made from aime_2024_problems\.parquet"),
        ("pickscore", "file.csv", r"is one file, but pickscore is made from .*train\.txt, .*test\.txt.*--split"),
        ("motion", "folder", "motion is generated, so --from means nothing"),
        ("edges", "folder", r"Put the published files there, or give a prompt file \(\.jsonl, \.json, \.csv\)"),
        ("edges", "mine.txt", r"is no \.parquet file; edges is made from data/train-00000-.*, or give a prompt file"),
        ("edges", "two.jsonl", r"two\.jsonl:1: brings 2 images .*one image per row is needed"),
        ("holes", "none.jsonl", r"none\.jsonl:1: brings 0 images"),
        ("holes", "cut.jsonl", r"cut\.jsonl:1: cut\.png cannot be read as an image"),
    ],
)
def test_what_cannot_be_a_source_is_said(tmp_path, name, given, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.csv").write_text("x")
    (tmp_path / "mine.txt").write_text("a cat")
    (tmp_path / "cat.png").write_bytes(framed("red", (64, 64)))
    (tmp_path / "cut.png").write_bytes(framed("red", (64, 64))[:-60])
    for name_of_file, images in (("two", ["cat.png", "cat.png"]), ("none", None), ("cut", ["cut.png"])):
        row = {"prompt": "cat 1"} | ({} if images is None else {"images": images})
        (tmp_path / f"{name_of_file}.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        prepare(SETS[name], tmp_path / name, given=tmp_path / given)


def test_a_part_of_ones_own_pictures_is_no_part_of_what_is_published(tmp_path):
    given = own_pictures(tmp_path / "mine")
    with pytest.raises(DataError, match=r"--partial is about published files; .*prompts\.jsonl is your own"):
        prepare(SETS["edges"], tmp_path / "edges", given=given, is_partial=True)


def test_one_file_of_any_name_will_do_where_one_is_needed(tmp_path):
    publish("pickscore", tmp_path / "published")
    given = tmp_path / "mine.txt"
    (tmp_path / "published/dataset/pickscore/train.txt").rename(given)
    prepare(SETS["pickscore"], tmp_path / "out", given=given, split="train", is_partial=True)
    assert len(prompts(tmp_path / "out/train.txt")) == 3


def test_a_file_for_a_folder_a_strange_split_and_a_broken_record_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file; motion is a folder of files"):
        prepare(SETS["motion"], tmp_path / "file")
    with pytest.raises(DataError, match="motion has no split 'val'; it has train, test"):
        prepare(SETS["motion"], tmp_path / "motion", split="val")
    write_text(tmp_path / "motion/SOURCE.json", '{"set": "motion"}')
    with pytest.raises(DataError, match=r"SOURCE\.json: is not what `trainer data` writes"):
        prepare(SETS["motion"], tmp_path / "motion")


# Downloads ----------------------------------------------------------------------------------------------------------


def test_a_file_of_github_is_downloaded_and_its_commit_noted(tmp_path, monkeypatch):
    published = publish("geo3k", tmp_path / "published")
    monkeypatch.setattr(GitHubRepository, "url", lambda self, file: (published / file.path).as_uri())
    prepare(SETS["geo3k"], tmp_path / "geo3k", is_partial=True)
    (repository,) = json.loads((tmp_path / "geo3k/SOURCE.json").read_text())["files"]["test.parquet"]["source"][
        "repositories"
    ]
    assert repository["revision"] == SETS["geo3k"].sources[0].revision
    assert list(repository["sha256"]) == ["data/geometry3k/test.zip"]


def test_without_network_the_message_has_all_that_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(GitHubRepository, "url", lambda self, file: f"file:///nowhere/{file.path}")
    with pytest.raises(DataError) as caught:
        prepare(SETS["pickscore"], tmp_path / "datasets/pickscore")
    message = str(caught.value)
    assert "of your own" not in message
    assert "of https://github.com/yifan123/flow_grpo at c7bb5fee2ef663eee08393759c8cb8a0e027f5e3" in message
    assert "curl -fL --create-dirs -o pickscore-published/dataset/pickscore/train.txt" in message
    assert message.endswith("uv run trainer data prepare pickscore --from pickscore-published")
    assert not (tmp_path / "datasets").exists()


def test_a_url_of_github_names_the_commit():
    source = GitHubRepository(name="a/b", revision="c0ffee", license="MIT", files=())
    assert source.url(PublishedFile("d/e f.txt")) == "https://raw.githubusercontent.com/a/b/c0ffee/d/e%20f.txt"


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from pathlib import Path
from unirl.datasets.catalog import SETS
from unirl.datasets.preparing import prepare
from unirl.types.errors import DataError
from unirl.types.recipe import Machine
try:
    prepare(SETS[sys.argv[1]], Path(sys.argv[2]), is_partial=True)
except DataError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path):
    """A hub in this process that has the files below tmp_path/published; its address."""
    published = tmp_path / "published"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            files = [path for path in sorted(published.rglob("*")) if path.is_file()]
            if path.startswith("/api/datasets/"):
                names = [{"rfilename": str(each.relative_to(published))} for each in files]
                entries = [
                    {"type": "file", "path": str(each.relative_to(published)), "size": each.stat().st_size, "oid": "0"}
                    for each in files
                ]
                info = {"_id": "x", "id": "a/b", "sha": COMMIT, "siblings": names}
                self.answer(json.dumps(entries if "/tree/" in path else info).encode(), "application/json")
                return
            found = [each for each in files if path.endswith(f"/{COMMIT}/{each.relative_to(published)}")]
            if not found:
                self.send_error(404)
                return
            self.answer(found[0].read_bytes(), "application/octet-stream")

        do_HEAD = do_GET

        def answer(self, body, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hash(body) & 0xFFFFFFFF:x}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetch(name, folder, endpoint, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub-cache")}
    # Other tests of the process may have said that there is no hub.
    environment.pop("HF_HUB_OFFLINE", None)
    environment = {key: value for key, value in environment.items() if not key.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )


def test_files_of_the_hub_are_downloaded_by_pattern_and_their_commit_noted(tmp_path, hub):
    publish("image_edit", tmp_path / "published")
    write_text(tmp_path / "published/README.md", "not wanted")
    result = fetch("image_edit", tmp_path / "out", hub, tmp_path)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "out/SOURCE.json").read_text())["files"]["train.parquet"]
    (repository,) = record["source"]["repositories"]
    assert repository["revision"] == COMMIT and len(repository["sha256"]["data/*.parquet"]) == 2
    assert list((tmp_path / "hub-cache").rglob("README.md")) == []


def test_a_hub_that_does_not_answer_or_has_no_such_file_is_said(tmp_path, hub):
    (tmp_path / "published").mkdir()
    missing = fetch("aime24", tmp_path / "out", hub, tmp_path)
    assert "(or its copy in the cache) has no aime_2024_problems.parquet" in missing.stderr
    silent = fetch("dapo_math", tmp_path / "out", "http://127.0.0.1:9", tmp_path)
    assert "dapo_math cannot be downloaded here: " in silent.stderr
    assert "hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --revision 6587" in silent.stderr
    assert silent.stderr.strip().endswith("uv run trainer data prepare dapo_math --from dapo_math-published")
    own = fetch("edges", tmp_path / "out", "http://127.0.0.1:9", tmp_path)
    assert own.stderr.strip().endswith("uv run trainer data prepare edges --from my-pictures/prompts.jsonl")
    assert not (tmp_path / "out").exists()


# Names and places ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("datasets/pickscore/train.txt", "uv run trainer data prepare pickscore"),
        ("/data/geo3k/test.parquet", "uv run trainer data prepare geo3k --out /data/geo3k"),
        ("datasets/pickscore/other.txt", None),
        ("datasets/mine/train.txt", None),
    ],
)
def test_a_missing_file_names_the_command_that_makes_it(path, command):
    assert command_for(path) == command
    message = unreadable("data.path", path, Machine(1, 0, command_for))
    assert message is not None and (f"Make it with: {command}, or set data.path." in message) == (command is not None)


def test_sets_have_names_and_files_of_their_own():
    assert all(name == each.name for name, each in SETS.items())
    for each in SETS.values():
        assert all(set_of(f"datasets/{each.name}/{output.file}") is each for output in each.outputs)
        known = {file.path for source in each.sources for file in source.files}
        assert {path for output in each.outputs for path in output.reads} == known
