"""`trainer data`: what it lists and makes, and that recipes and scorers fit what it makes."""

import json
from pathlib import Path

import pytest

from unirl.app.command_line import Command, parse
from unirl.app.environment import register_resolvers
from unirl.app.main import USER_ERROR, main
from unirl.app.named_data import data_paths, named_data
from unirl.config.catalog import available
from unirl.config.check import machine_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.datasets import geneval, ocr
from unirl.datasets.catalog import FOLDER, SETS, command_for, set_of
from unirl.datasets.preparing import prepare
from unirl.reward.local.detection.geneval import GENEVAL_NAMES
from unirl.reward.local.detection.geneval_rules import COLOURS, RELATIONS, check_row
from unirl.reward.local.ocr.ocr import quoted
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

COCO = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag,
tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard,
tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote,
keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear,
hair drier, toothbrush
"""
"""The classes of COCO 2017 as its detectors name them."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DATA_PATH", "EVAL_DATA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def trainer(here, capsys):
    """Runs a command; returns (status, standard output, standard error)."""

    def run(*words):
        status = main(list(words))
        return status, *capsys.readouterr()

    return run


# Recipes and scorers ------------------------------------------------------------------------------------------------


VIDEOS_OF_ONES_OWN = "datasets/captioned_videos/train.jsonl"
"""What no set gives."""


@pytest.mark.parametrize("name", available())
def test_every_recipe_names_data_that_it_brings_or_that_this_command_makes(name, recipes, here):
    paths = data_paths(recipes[name])
    assert paths
    to_make = [path for path in paths if not Path(path).exists()]
    for path in to_make:
        if path == VIDEOS_OF_ONES_OWN:
            continue
        made = set_of(path)
        assert made is not None and Path(path).parent == FOLDER / made.name, (
            f"{name} names {path}, which is neither package data nor made by `trainer data`; see unirl.datasets"
        )
    assert named_data(name) == to_make


def test_the_drawn_characters_are_data_that_the_recipe_of_wan_animate_takes(here):
    prepare(SETS["characters"], here / FOLDER / "characters")
    register_resolvers()
    run = run_of(resolve(compose("wan22/animate")))
    found = list(machine_findings(run, Machine(num_cpus=8, num_gpus=8)))
    assert [each for each in found if each.startswith(("data.", "eval."))] == []


def test_geneval_rows_are_ones_that_the_scorer_takes():
    labels = [GENEVAL_NAMES.get(name, name) for name in geneval.names]
    assert sorted(labels) == sorted(" ".join(COCO.split()).split(", "))
    for held_out in (False, True):
        for row in geneval.rows(held_out=held_out):
            check_row(row, geneval.names, row["prompt"])


def test_geneval_words_are_the_scorers_own():
    assert (geneval.COLOURS, geneval.RELATIONS) == (COLOURS, RELATIONS)


def test_ocr_prompts_quote_what_the_scorer_reads():
    for held_out in (False, True):
        for row in ocr.rows(held_out=held_out):
            assert quoted(row["prompt"], "ocr") == row["text"]


# The command --------------------------------------------------------------------------------------------------------


def test_a_set_is_made_once_and_listed_as_there(trainer, here):
    status, out, _ = trainer("data", "prepare", "motion")
    assert (status, out.splitlines()) == (
        0,
        ["wrote datasets/motion/train.jsonl (1,800 rows)", "wrote datasets/motion/test.jsonl (200 rows)"],
    )
    assert trainer("data", "prepare", "motion")[1].startswith("already there: datasets/motion/train.jsonl")
    _, listed, _ = trainer("data", "list")
    assert all(name in listed for name in SETS)
    (row,) = [line for line in listed.splitlines() if "motion" in line and "1,800" in line]
    assert "yes" in row


def test_all_about_a_set_names_its_files_licence_and_recipes(trainer):
    status, out, _ = trainer("data", "list", "aime24")
    assert status == 0
    assert "https://huggingface.co/datasets/Maxwell-Jia/AIME_2024 at main (license: MIT)" in out
    assert "aime_2024_problems.parquet, 30 rows" in out
    assert "llm/qwen3_4b_dapo_grpo" in out.split("recipes: ")[1]


def test_a_set_from_local_files_into_another_folder(trainer, here):
    (here / "wise" / "data").mkdir(parents=True)
    row = {
        "Prompt": "a fruit that fell on Newton",
        "Explanation": "an apple",
        "Category": "science",
        "Subcategory": "x",
    }
    for name in ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science"):
        rows = [{**row, "Prompt": f"{name} {number}"} for number in range(20)]
        (here / "wise" / "data" / f"{name}.json").write_text(json.dumps(rows))
    status, _, error = trainer("data", "prepare", "wise", "--from", "wise", "--out", "mine")
    assert status == USER_ERROR and "is published with 400" in error and not Path("mine").exists()
    status, out, _ = trainer(
        "data", "prepare", "wise", "--from", "wise", "--out", "mine", "--partial", "--split", "train"
    )
    assert status == 0 and out.startswith("wrote mine/train.jsonl (") and not Path("mine/test.jsonl").exists()
    other = ["parts/reward=pickscore", "eval=null"]  # the verifier of shapes reads no other prompts
    assert trainer("check", "--strict", "worlds/shapes/nft", *other, "data.path=mine/train.jsonl")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "pickscor"], "unknown set 'pickscor'. Did you mean pickscore?"),
        (["list", "genevall"], "unknown set 'genevall'. Did you mean geneval or geneval2"),
        (["prepare"], "data prepare takes the name of one set, not 0"),
        (["prepare", "ocr", "motion"], "data prepare takes the name of one set, not 2"),
        (["list", "ocr", "motion"], "data list takes the name of one set or none"),
        (["prepar", "ocr"], "data does one of list, prepare, not 'prepar'. Did you mean prepare?"),
        (["geneval"], "not 'geneval'. To make a set: uv run trainer data prepare geneval."),
        (["list", "--overwrite"], "--overwrite does nothing with data list"),
        (["prepare", "ocr", "--strict"], "--strict does nothing with 'data'; it is for: check"),
        (["prepare", "ocr", "--cfg", "job"], "data takes no recipe"),
        (["prepare", "ocr", "--from", "x"], "ocr is generated, so --from means nothing"),
    ],
)
def test_a_mistake_has_one_message(trainer, words, message):
    status, _, error = trainer("data", *words)
    assert status == USER_ERROR and message in error
    assert not FOLDER.exists()


def test_options_of_data_mean_nothing_elsewhere():
    with pytest.raises(ConfigError, match=r"--from does nothing with 'check'; it is for: data\."):
        parse(["check", "worlds/shapes/nft", "--from", "x"])


def test_without_an_action_sets_are_listed():
    assert parse(["data"]) == parse(["data", "list"]) == Command("data", "list")


def test_check_names_the_command_that_makes_missing_data(trainer):
    status, _, error = trainer("check", "--strict", "worlds/shapes/nft", "data.path=datasets/pickscore/train.txt")
    assert status == USER_ERROR
    assert "data.path = datasets/pickscore/train.txt: no such prompt file" in error
    assert f"Make it with: {command_for('datasets/pickscore/train.txt')}, or set data.path." in error
