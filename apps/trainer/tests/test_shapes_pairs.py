"""The preference pairs of the shapes world, shipped and drawn."""

import json
from pathlib import Path

import numpy as np
import torch

import unirl.worlds.shapes.world
from unirl.data.pairs import read_pairs
from unirl.reward.worlds.shapes import score_shapes
from unirl.rollout.engine.offline.pictures import read_pictures
from unirl.worlds.shapes import pairs, world

SHIPPED = Path(unirl.worlds.shapes.world.__file__).parent / "data" / "pairs" / "pairs.jsonl"


def test_every_shipped_pair_is_right_and_wrong_about_a_training_prompt():
    rows = read_pairs(SHIPPED, size=(32, 32))
    assert len(rows) == 512
    assert {row.prompt for row in rows} == set(world.split_prompts()[0])
    prompts = [row.prompt for row in rows]
    strict, soft = [], []
    for place in (0, 1):
        pixels = read_pictures([row.metadata["images"][place] for row in rows], 32, 32)
        verdict = score_shapes(pixels, prompts)
        strict.append(verdict[0])
        soft.append(verdict[1])
    assert torch.equal(strict[0], torch.ones(512)) and torch.equal(strict[1], torch.zeros(512))
    assert 0.5 < float(soft[1].mean()) < 0.8
    assert all(row.metadata["scores"] == [1, 0] for row in rows)


def test_the_shipped_files_are_small():
    assert sum(path.stat().st_size for path in SHIPPED.parent.iterdir()) < 300_000


def test_the_command_writes_the_shipped_pairs_again_without_loss(tmp_path):
    drawn = pairs.draw_pairs(20, seed=0)
    pairs.write_pairs(tmp_path, drawn)
    rows = read_pairs(tmp_path / "pairs.jsonl", size=(32, 32))
    again = read_pictures([reference for row in rows for reference in row.metadata["images"]], 32, 32)
    pictures = np.stack([picture for _, chosen, rejected in drawn for picture in (chosen, rejected)])
    assert torch.equal((again * 255).round().byte(), torch.from_numpy(pictures))
    shipped = [json.loads(line)["prompt"] for line in SHIPPED.read_text().splitlines()[:20]]
    assert [row.prompt for row in rows] == shipped
    first = read_pictures(read_pairs(SHIPPED)[0].metadata["images"], 32, 32)
    assert torch.equal(first, again[:2])
