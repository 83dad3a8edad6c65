"""Training on given pairs from recipe to checkpoint: nothing but the data, the engine and a scorer are special."""

import json
import threading

import pytest

from unirl.config.runs import run_of
from unirl.tracking.jsonl import JsonlTracker
from unirl.trainer.commands import run_recipe
from unirl.types.errors import DataError

PAIRS = ("sampling.samples_per_prompt=2", "batch_size=8")


def test_given_pairs_train_and_the_policy_is_evaluated(recipe, tmp_path):
    small = recipe(
        "worlds/shapes/dpo", *PAIRS, "stack.num_updates_per_batch=2", "eval.num_samples=64", f"run_dir={tmp_path}"
    )
    summary = run_recipe(run_of(small), tmp_path, [], threading.Event())
    assert summary["num_rollouts"] == 2 and summary["num_samples"] == 32
    before, after = summary["eval_before"]["overall"], summary["eval_after"]["overall"]
    # Labels are of given images; what an evaluation samples is judged by the verifier.
    assert before["labels"] == pytest.approx(before["shapes/strict"] + before["shapes/soft"])
    assert before["reward"] == pytest.approx(before["labels"]) and after["reward"] != before["reward"]
    state = json.loads((tmp_path / "checkpoints" / "step-000002" / "driver_state.json").read_text())
    assert state["next_rollout"] == 2


def test_given_drawings_are_learned(recipe, tmp_path):
    small = recipe(
        "sft/shapes", "sampling.samples_per_prompt=1", "batch_size=8", "eval.num_samples=64", f"run_dir={tmp_path}"
    )
    summary = run_recipe(run_of(small), tmp_path, [JsonlTracker()], threading.Event())
    assert summary["num_samples"] == 16
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # The verifier confirms every drawing; what an evaluation samples is the policy's.
    assert [each["reward/shapes/strict/mean"] for each in metrics if "train/loss" in each] == [1.0, 1.0]
    assert summary["eval_before"]["overall"]["shapes/strict"] < 1 > summary["eval_after"]["overall"]["shapes/strict"]


def test_a_picture_that_goes_missing_is_named(recipe, tmp_path):
    row = {"prompt": "a red circle", "images": ["a.png", "b.png"], "scores": [1, 0]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    small = recipe("worlds/shapes/dpo", *PAIRS, f"data.path={tmp_path}/pairs.jsonl", "eval=null")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: image a\.png does not exist"):
        run_recipe(run_of(small), tmp_path, [], threading.Event())
