"""A unified model thinks, draws and learns from one rollout: jointly, by turns, resumed, and on Ray."""

import math

import pytest
import stopping
import torch
from safetensors.torch import load_file
from small import SMALL_UNIFIED
from stopping import comparable

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.trainer.commands import export_recipe

QUIET = ["eval=null", "save.best_metric=reward", "media_interval=0"]


@pytest.fixture(scope="module")
def small():
    """small(*overrides) -> the recipe of the thoughts world with a few samples."""
    register_resolvers()
    return lambda *overrides: resolve(compose("worlds/thoughts/nft", [*SMALL_UNIFIED, *overrides]))


def run(recipe, run_dir, after=10**9):
    check_recipe(recipe)
    summary, records = stopping.run(recipe, run_dir, after)
    return summary, {step: comparable(metrics) for step, metrics in records.items()}


def test_thoughts_and_images_learn_from_one_rollout(small, tmp_path):
    summary, records = run(small("num_rollouts=1"), tmp_path)
    metrics = records[1]
    assert metrics["text/train/grad_norm"] > 0 and metrics["image/train/grad_norm"] > 0
    assert -1 <= metrics["train/grad_cosine/text_image"] <= 1
    # Thoughts come from the policy that trains, images from its copy "old".
    assert metrics["text/policy/first_ratio_max_abs_dev"] < 1e-5
    assert metrics["text/rollout/empty"] == 0
    assert metrics["reward/mean"] == pytest.approx(metrics["image/reward/mean"])  # means of images
    assert metrics["group/count"] == 2 and metrics["image/group/count"] == 4
    assert summary["num_samples"] == 16
    assert not [name for name, value in metrics.items() if math.isnan(value)]
    assert "shapes/strict" in summary["eval_after"]["overall"]
    shown = {path.name for path in (tmp_path / "samples").iterdir()}
    assert {"rollout-000001.png", "eval-000001.png", "before_after.png"} <= shown


@pytest.mark.slow
@pytest.mark.parametrize("still", ["text", "image"])
def test_one_track_learns_alone(small, tmp_path, still):
    alone = [f"algorithms.{still}=null", "stack.losses=null", "stack.measures_balance=false", "num_rollouts=1"]
    _, records = run(small(*QUIET, *alone), tmp_path)
    assert records[1]["train/grad_norm"] > 0
    assert records[1]["text/rollout/empty"] == 0  # both are sampled


@pytest.mark.slow
def test_tracks_take_turns_and_a_resumed_run_continues_bit_for_bit(small, tmp_path):
    turns = ["stack.losses.text.every=2", "stack.losses.image.every=2", "stack.losses.image.turn=1"]
    recipe = small(*QUIET, *turns, "stack.measures_balance=false", "stack.num_updates_per_batch=1", "num_rollouts=4")
    _, whole = run(recipe, tmp_path / "whole")
    assert ["text/policy/loss" in whole[step] for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert ["image/policy/loss" in whole[step] for step in (1, 2, 3, 4)] == [False, True, False, True]
    # Stopped between two turns: which track's turn it is belongs to the state.
    _, first = run(recipe, tmp_path / "parts", after=1)
    _, second = run({**recipe, "resume": "auto"}, tmp_path / "parts")
    assert {**first, **second} == whole
    exported = []
    for name in ("whole", "parts"):
        export_recipe(run_of(recipe), tmp_path / name, tmp_path / f"export-{name}", merged=True)
        exported.append(load_file(tmp_path / f"export-{name}" / "ema.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_of_two_cores")
def test_one_worker_and_two_agree(small, tmp_path):
    recipe = small(*QUIET, "num_rollouts=1", "batch_size=4")
    _, local = run(recipe, tmp_path / "local")
    _, two = run({**recipe, "runtime": "ray", "num_devices": 2}, tmp_path / "two")
    assert set(local[1]) == set(two[1])
    # Rewards are of the same thoughts and images; what training measures differs by the order of sums over devices.
    exact = [name for name in local[1] if name.startswith(("reward/", "image/reward/", "group/", "image/group"))]
    assert {name: two[1][name] for name in exact} == {name: local[1][name] for name in exact} and len(exact) > 10
    for name, value in local[1].items():
        if name.endswith(("policy/loss", "train/grad_norm")):
            assert two[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
