"""Training on given pairs from recipe to checkpoint: nothing but the data, the engine and a scorer are special."""

import dataclasses
import json
import threading
from typing import Any

import pytest
import torch

from unirl.app.environment import packaged_path
from unirl.config.runs import run_of
from unirl.data.targets import read_targets
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.rollout.engine.offline.engine import OfflineRolloutEngine
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.tracking.jsonl import JsonlTracker
from unirl.trainer.commands import run_recipe
from unirl.trainer.request import build_request
from unirl.types.errors import DataError
from unirl.types.sampling import DiffusionSamplingParams

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


def test_a_dropped_prompt_is_conditioned_as_the_unconditional_side_of_guidance():
    bundle = SD3Bundle(packaged_path("shapes", "checkpoint"))
    pipeline = SD3Pipeline(bundle, FlowSDEStrategy(), SigmaSchedule("linear"), decode_batch_size=8)
    params = DiffusionSamplingParams(
        num_inference_steps=2,
        guidance_scale=1.0,
        negative_prompt="",
        eta=0.0,
        height=32,
        width=32,
        max_sequence_length=6,
    ).resolved(1)
    rows = read_targets(packaged_path("shapes", "data/pairs/chosen.jsonl"))[:24]
    shape = pipeline.latent_shape(params)
    req = build_request(rows, params, sigmas=pipeline.sigmas(params), latent_shape=shape, rollout_id=1)

    def given(dropout) -> Any:
        own = OfflineRolloutEngine(pipeline, forward_batch_size=16, prompt_dropout=dropout)
        return own.generate(req).root_track().conditions["text"]

    kept, dropped = given(0.0), given(0.5)
    plain: Any = pipeline.encode(req.primitives, params)["text"]
    guided = dataclasses.replace(params, guidance_scale=4.5)
    negative: Any = pipeline.encode(req.primitives, guided)["negative_text"]
    is_dropped = (dropped.embeds == negative.embeds).flatten(1).all(1)
    assert 4 < int(is_dropped.sum()) < 20
    for name in ("embeds", "pooled"):
        own, prompts, without = (getattr(each, name) for each in (dropped, plain, negative))
        assert torch.equal(getattr(kept, name), prompts)
        assert torch.equal(own[is_dropped], without[is_dropped]) and torch.equal(own[~is_dropped], prompts[~is_dropped])


def test_a_picture_that_goes_missing_is_named(recipe, tmp_path):
    row = {"prompt": "a red circle", "images": ["a.png", "b.png"], "scores": [1, 0]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    small = recipe("worlds/shapes/dpo", *PAIRS, f"data.path={tmp_path}/pairs.jsonl", "eval=null")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: image a\.png does not exist"):
        run_recipe(run_of(small), tmp_path, [], threading.Event())
