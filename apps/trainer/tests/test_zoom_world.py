"""The zoom world: what its images show, that a crop shows it, and that the base can be made."""

from __future__ import annotations

import filecmp
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.data.datasets import read_rows
from unirl.data.pictures import read_picture
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.rollout.environments.tools.images import Crop
from unirl.rollout.turns.calls import ToolCall, calls_of
from unirl.types.errors import ConfigError
from unirl.types.media import shown_image
from unirl.types.messages import Message, demonstration
from unirl.types.recipe import Machine
from unirl.worlds.zoom import pretrain, world
from unirl.worlds.zoom.world import LETTERS, Sight, box_of

FOLDER = Path(world.__file__).parent
SMALL = Sight("L", "small", 6, 0, 0, (3, -2))


def test_a_small_letter_stands_in_its_cell_and_a_crop_shows_it_alone():
    assert SMALL.box == box_of(6) == (64, 32, 96, 64)
    lit = np.argwhere(SMALL.image().max(axis=0) > 0)
    assert (lit.min(axis=0).tolist(), lit.max(axis=0).tolist()) == ([46, 73], [55, 82])  # 48 - 5 + 3, 80 - 5 - 2
    assert len(lit) == 9 * 4, "nine dots of two by two pixels"
    task: Any = {"images": (shown_image(torch.from_numpy(SMALL.image())),)}
    (crop,) = Crop(min_side=16)({"box": list(SMALL.box)}, task).images
    assert (crop.height, crop.width) == (32, 32)
    pixels = np.frombuffer(crop.pixels, np.uint8).reshape(32, 32, 3)
    assert (pixels.transpose(2, 0, 1) == SMALL.image()[:, 32:64, 64:96]).all()


def test_letters_differ_and_fit_their_places():
    assert len(set(LETTERS.values())) == len(LETTERS) == 8
    for shift in (-6, 6):
        for cell in range(world.NUM_CELLS):
            left, top, right, bottom = box_of(cell)
            image = Sight("O", "small", cell, 0, 0, (shift, shift)).image()
            assert image[:, top:bottom, left:right].any() and image.any(axis=0).sum() == 12 * 4
    large = Sight("O", "large", 0, 0, 0, (18, -18)).image()
    assert large.any(axis=0).sum() == 12 * 12**2


def test_drawn_sights_keep_to_their_side_and_shares():
    rng = np.random.default_rng(5)
    for held_out in (False, True):
        found = world.sights(200, rng, held_out=held_out)
        assert all(world.is_held_out(sight) == held_out for sight in found)
        assert Counter(sight.category for sight in found) == {"small": 140, "large": 60}
        assert {sight.letter for sight in found} == set(LETTERS)
    drawn = [world.is_held_out(Sight(letter, "small", cell, 0, 0, (0, 0))) for letter in LETTERS for cell in range(999)]
    assert np.mean(drawn) == pytest.approx(0.1, abs=0.02)


def test_the_shipped_files_are_those_that_the_script_writes(tmp_path: Path):
    world.write_prompts(tmp_path)
    names = [f"{name}.{kind}" for name in ("train", "heldout", "solved") for kind in ("jsonl", "png")]
    assert filecmp.cmpfiles(tmp_path, FOLDER / "data", names, shallow=False) == (names, [], [])
    rows = read_rows(FOLDER / "data" / "heldout.jsonl")
    found = world.sights(world.NUM_HELDOUT, np.random.default_rng(1), held_out=True)
    for row, sight in list(zip(rows, found, strict=True))[::40]:
        assert row.metadata == {"answer": sight.letter, "category": sight.category}
        assert (np.asarray(read_picture(row.media[0]) * 255).round().astype(np.uint8) == sight.image()).all()


def test_a_solved_conversation_is_what_the_tool_and_its_reader_make_of_it():
    rows = read_rows(FOLDER / "data" / "solved.jsonl")
    assert Counter(row.metadata["category"] for row in rows) == {
        category: share * world.NUM_SOLVED for category, share in world.SHARES.items()
    }
    found = world.sights(world.NUM_SOLVED, np.random.default_rng(world.NUM_SOLVED), held_out=False)
    for row, sight in list(zip(rows, found, strict=True))[::100]:
        pixels = [read_picture(ref) for ref in row.media]
        said = demonstration(row.prompt, row.metadata, [shown_image(each) for each in pixels])
        assert said is not None and said[0] == Message("user", world.PROMPT, said[0].images)
        assert (np.asarray(pixels[0] * 255).round().astype(np.uint8) == sight.image()).all()
        assert said[-1] == Message("assistant", sight.letter) and row.metadata["answer"] == sight.letter
        if sight.category == "large":
            assert len(said) == 2
            continue
        assert said[1] == Message("assistant", pretrain.call_text(sight.box))
        task: Any = {"images": said[0].images}
        assert said[2] == Message("tool", "", Crop(min_side=16)({"box": list(sight.box)}, task).images)


def test_conversations_with_images_need_a_model_that_reads_them(tmp_path: Path):
    register_resolvers()

    def found(*words: str) -> str:
        try:
            check_recipe(resolve(compose("sft/zoom", list(words))), Machine(num_cpus=8, num_gpus=0))
        except ConfigError as error:
            return str(error)
        return ""

    assert found() == ""
    omni = "bundle._target_=unirl.models.qwen3_omni.bundle.Qwen3OmniThinkerBundle"
    assert f"{world.NUM_SOLVED} conversations (zoom-solved-0000, " in (
        said := found(omni, "~bundle.random_weights", "~turns")
    )
    assert "Qwen3OmniThinkerBundle reads none there (reads_images_in_turns). Take a model that does" in said
    path = tmp_path / "data.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "folder").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "a.png")
    path.write_text(json.dumps({**row, "images": ["b.png"]}) + "\n")
    assert f"{path}:1: the image b.png does not exist" in found(f"data.path={path}")
    video = {"modality": "video", "role": "condition", "uri": "folder"}
    path.write_text(json.dumps({**row, "media": [video]}) + "\n")
    assert "1 conversations (data.jsonl:0) bring media other than images" in found(f"data.path={path}")


def test_a_call_is_read_as_it_is_written():
    tokenizer: Any = pretrain.make_tokenizer()
    tokens = tokenizer(pretrain.call_text(SMALL.box), add_special_tokens=False)["input_ids"]
    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    calls = calls_of(tokens, begin, end, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    assert calls == (ToolCall("crop", {"box": [64, 32, 96, 64]}),)
    longest = tokenizer(pretrain.call_text((96, 96, 128, 128)), add_special_tokens=False)["input_ids"]
    assert len(longest) + 1 <= 24  # sampling.max_new_tokens


def test_lessons_show_the_cell_and_another(tmp_path: Path):
    pretrain.save_random_model(tmp_path)
    pipeline = QwenVLPipeline(QwenVLBundle(str(tmp_path)))
    lessons = pretrain.make_lessons(pipeline, [SMALL], np.random.default_rng(0))
    (right, other) = lessons.closer[0]
    assert right[0] == 6 != other[0]
    said = pipeline.bundle.tokenizer.decode(right[1])
    assert said == (
        f"\n<|im_start|>user\n<tool_response>\n<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert right[2].grids == lessons.images.grids == [((1, 4, 4),)], "crops are as large to the model as whole images"
    assert not torch.equal(right[2].patches, other[2].patches)


def test_the_base_is_made_by_the_script(tmp_path: Path):
    out = tmp_path / "base"
    pretrain.pretrain(out, seed=0, budget=pretrain.Budget(seeing=2, right=2, traces=2), num_lessons=60)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert sum(file.stat().st_size for file in out.iterdir()) < 3_000_000
    shipped = json.loads((FOLDER / "checkpoint" / "config.json").read_text())
    assert shipped == json.loads((out / "config.json").read_text())
