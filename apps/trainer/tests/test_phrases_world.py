"""The phrases world: by hand, that phrases mean what their rows say, and that the writer can be made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import unirl.worlds.shapes.phrases.world
from unirl.reward.worlds.shapes_grammar import RELATIONS, SHAPES, PromptSpec, ShapeObject, parse_prompt, prompt_of
from unirl.worlds.shapes.phrases import pretrain, world
from unirl.worlds.shapes.phrases.evaluate import evaluate, is_right
from unirl.worlds.shapes.phrases.text import INSTRUCTION, UNKNOWN, phrase_tokenizer
from unirl.worlds.shapes.world import layouts_for, scene_key

FOLDER = Path(unirl.worlds.shapes.phrases.world.__file__).parent
SIDES = dict(zip(("train", "heldout"), world.split_specs(), strict=True))


def rows(name: str) -> list[dict]:
    """Rows of a shipped prompt file."""
    return [json.loads(line) for line in (FOLDER / "data" / f"{name}.jsonl").read_text().splitlines()]


def plain(phrase: str) -> str:
    """What a phrase means, by another way than the world's: every word replaced by the painter's."""
    words = {word: color for color, each in world.COLOR_WORDS.items() for word in each}
    words |= {word: shape for shape, each in world.SHAPE_WORDS.items() for word in each}
    words |= {f"{word}s": f"{shape}s" for shape, each in world.SHAPE_WORDS.items() for word in each}
    numbers = ("one", "two", "three", "four")
    words |= {word: numbers[number - 1] for number, each in world.NUMBER_WORDS.items() for word in each}
    words |= {word: relation for relation, each in world.RELATION_WORDS.items() for word in each}
    words |= dict.fromkeys(world.JOINING_WORDS, "and") | {"an": "a"}
    swapped = re.sub(r"^(.*?) ([\w-]+(?: ones?)?), in ([\w-]+)$", r"\1 \3 \2", phrase)
    for word in sorted(words, key=len, reverse=True):
        swapped = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", words[word].upper(), swapped)
    return swapped.lower()


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_every_shipped_phrase_means_what_its_row_says_and_keeps_to_its_side(name: str):
    keys = {scene_key(spec) for spec in SIDES[name]}
    found = rows(name)
    assert len({row["prompt"] for row in found}) == len(found) == {"train": 800, "heldout": 240}[name]
    for row in found:
        meaning = row["metadata"]["meaning"]
        assert plain(row["prompt"]) == meaning
        assert scene_key(parse_prompt(meaning)) in keys
        assert parse_prompt(meaning).category == row["metadata"]["category"]


def test_no_held_out_request_is_trained_on():
    train, heldout = ({scene_key(parse_prompt(row["metadata"]["meaning"])) for row in rows(n)} for n in SIDES)
    assert not train & heldout


def test_the_files_are_what_the_script_writes(tmp_path: Path):
    world.write_prompts(tmp_path)
    for name in SIDES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (FOLDER / "data" / f"{name}.jsonl").read_bytes()


def test_most_phrases_use_words_that_the_painter_does_not_know():
    known = {"a", *re.findall(r"\w+", " ".join((*world.COLOR_WORDS, *SHAPES, *RELATIONS, "and one two three four")))}
    foreign = [row for row in rows("heldout") if set(re.findall(r"[\w-]+", row["prompt"])) - known]
    assert len(foreign) == len(rows("heldout"))


@pytest.mark.parametrize("name", list(SIDES))
def test_rewrites_are_what_their_kinds_say(name: str):
    rng = np.random.default_rng(0)
    for spec in SIDES[name]:
        more = parse_prompt(world.elaborated(spec, rng))
        assert is_right(prompt_of(more), prompt_of(spec))
        assert set(layouts_for(more)) <= set(layouts_for(spec))
        wrong = world.slipped(spec, rng)
        same = [a == b for a, b in zip(wrong.split(), prompt_of(spec).split(), strict=True)]
        assert same.count(False) == 1
        phrase, read = world.worded(spec, rng)
        is_misread = any(re.search(rf"(?<![\w-]){word}s?(?![\w-])", phrase) for word in world.MISREAD)
        assert is_misread or read == spec


def test_misread_by_hand(monkeypatch: pytest.MonkeyPatch):
    spec = PromptSpec("position", (ShapeObject("red", "circle"), ShapeObject("blue", "square")), "above")
    words = iter(["cherry", "sapphire", "coin", "tile", "over"])
    monkeypatch.setattr(world, "_pick", lambda choices, rng: next(words))
    phrase, read = world.worded(spec, np.random.default_rng(0))
    assert phrase == "a cherry coin over a sapphire tile"
    assert prompt_of(read) == "a yellow square below a green triangle"


@pytest.mark.parametrize(
    ("rewrite", "meaning", "right"),
    [
        ("one red circle", "a red circle", True),
        ("a red circle above a blue square", "a blue square and a red circle", True),
        ("a red circle above a blue square", "a blue square below a red circle", True),
        ("a red circle and a blue square", "a blue square below a red circle", False),
        ("two red circles", "one red circle", False),
        ("a red ball", "a red circle", False),
    ],
)
def test_a_rewrite_is_right_where_all_that_it_allows_is_asked_for(rewrite: str, meaning: str, right: bool):
    assert is_right(rewrite, meaning) is right


def test_the_writer_knows_every_word_and_writes_prompts_as_the_painter_reads_them():
    tokenizer = phrase_tokenizer()
    for row in rows("train") + rows("heldout"):
        assert tokenizer.unk_token_id not in tokenizer(INSTRUCTION.format(prompt=row["prompt"]))["input_ids"]
        meaning = row["metadata"]["meaning"]
        assert tokenizer.decode(tokenizer(meaning)["input_ids"], skip_special_tokens=True) == meaning
    assert tokenizer("a purple box")["input_ids"][1] == tokenizer.convert_tokens_to_ids(UNKNOWN)


def test_the_shipped_writer_is_partly_right():
    torch.manual_seed(0)
    found = evaluate(FOLDER / "checkpoint")
    assert 0.35 < found["greedy"] < 0.6


@pytest.mark.matrix
def test_a_writer_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrain, "NUM_LESSONS", 64)
    pretrain.pretrain(tmp_path, seed=0, budget=pretrain.Budget(writer=2))
    shipped = json.loads((FOLDER / "checkpoint" / "config.json").read_text())
    made = json.loads((tmp_path / "config.json").read_text())
    assert {**made, "transformers_version": None} == {**shipped, "transformers_version": None}
    assert (tmp_path / "tokenizer.json").read_bytes() == (FOLDER / "checkpoint" / "tokenizer.json").read_bytes()
