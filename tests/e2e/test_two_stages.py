"""A writer and a painter learn from one rollout: together, each alone, resumed, exported and on Ray."""

import json
import math

import pytest
import stopping
import torch
from safetensors.torch import load_file
from small import SMALL_REDRAW, SMALL_STAGES, push_to_copies
from stopping import comparable

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.trainer.commands import evaluate_recipe, export_recipe
from unirl.types.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def small():
    """small(*overrides) -> the recipe of the phrases world with a few samples."""
    register_resolvers()
    return lambda *overrides: resolve(compose("worlds/phrases/both", [*SMALL_STAGES, *overrides]))


def run(recipe, run_dir, after=10**9):
    check_recipe(recipe)
    summary, records = stopping.run(recipe, run_dir, after)
    return summary, {step: comparable(metrics) for step, metrics in records.items()}


def exported(recipe, run_dir, folder, policy):
    export_recipe(run_of(recipe), run_dir, folder, merged=True, policy=policy)
    (file,) = (folder / {"writer": ".", "painter": "transformer"}[policy]).glob("*.safetensors")
    return load_file(file)


def test_both_policies_learn_from_one_rollout(small, tmp_path):
    summary, records = run(small("num_rollouts=1"), tmp_path)
    metrics = records[1]
    assert metrics["writer/train/grad_norm"] > 0 and metrics["painter/train/grad_norm"] > 0
    assert metrics["writer/policy/first_ratio_max_abs_dev"] < 1e-5
    assert metrics["text/rollout/fallback"] == 0 and metrics["image/rollout/cut_tokens"] == 0
    assert metrics["reward/mean"] == pytest.approx(metrics["image/reward/mean"])  # each text has the mean of its images
    assert metrics["group/count"] == 2 and metrics["image/group/count"] == 4
    assert summary["num_samples"] == 8
    held_out = summary["eval_after"]["overall"]
    assert {"shapes/strict", "without_writer/shapes/strict"} <= set(held_out)
    assert not [name for name, value in metrics.items() if math.isnan(value)]
    shown = {path.name for path in (tmp_path / "samples").iterdir()}
    assert {"rollout-000001.png", "eval-000001.png", "before_after.png"} <= shown


@pytest.mark.slow
def test_a_resumed_run_continues_both_policies_bit_for_bit_and_exports_them_by_name(small, tmp_path):
    recipe = small("eval=null", "save.best_metric=reward", "media_interval=0")
    _, whole = run(recipe, tmp_path / "whole")
    _, first = run(recipe, tmp_path / "parts", after=1)
    _, second = run({**recipe, "resume": "auto"}, tmp_path / "parts")
    assert {**first, **second} == whole and set(whole) == {1, 2}
    for policy in ("writer", "painter"):
        one = exported(recipe, tmp_path / "whole", tmp_path / f"a-{policy}", policy)
        two = exported(recipe, tmp_path / "parts", tmp_path / f"b-{policy}", policy)
        assert all(torch.equal(value, two[name]) for name, value in one.items())
    with pytest.raises(ConfigError, match="policy 'poet': this run has the policies writer, painter"):
        export_recipe(run_of(recipe), tmp_path / "whole", tmp_path / "c", merged=True, policy="poet")
    result = evaluate_recipe(run_of(small("eval.policy={painter:old}")), tmp_path / "whole", checkpoint="newest")
    assert "shapes/strict" in result.overall


@pytest.mark.slow
def test_three_stages_train_both_policies_and_resume_bit_for_bit(tmp_path):
    """The painter draws twice: its second image goes on from the first, which is credited with its reward."""
    register_resolvers()
    recipe = resolve(compose("worlds/phrases/redraw", SMALL_REDRAW))
    _, whole = run(recipe, tmp_path / "whole")
    _, first = run(recipe, tmp_path / "parts", after=1)
    _, second = run({**recipe, "resume": "auto"}, tmp_path / "parts")
    assert {**first, **second} == whole and set(whole) == {1, 2}
    metrics = whole[1]
    assert metrics["writer/train/grad_norm"] > 0 and metrics["painter/train/grad_norm"] > 0
    assert metrics["redraw/rollout/cut_tokens"] == 0 and metrics["image/group/count"] == 4
    with (tmp_path / "whole" / "samples" / "rollout-000001.jsonl").open() as lines:
        records = {record["sample_id"]: record for record in map(json.loads, lines)}
    redrawn = next(record for record in records.values() if record["track"] == "redraw")
    drawn = records[redrawn["parent_id"]]
    assert (drawn["track"], records[drawn["parent_id"]]["track"]) == ("image", "text")
    assert drawn["scores"] == redrawn["scores"] and drawn["drawn_from"] == redrawn["drawn_from"]


@pytest.mark.slow
@pytest.mark.parametrize(("still", "learning"), [("painter", "writer"), ("writer", "painter")])
def test_one_policy_learns_alone(small, tmp_path, still, learning):
    recipe = small(f"policies.{still}.trains=false", "eval=null", "save.best_metric=reward", "num_rollouts=1")
    _, records = run(recipe, tmp_path)
    assert records[1][f"{learning}/train/grad_norm"] > 0 and f"{still}/train/grad_norm" not in records[1]
    with pytest.raises(ConfigError, match=f"policy '{still}' does not train in this run; its weights are those of its"):
        export_recipe(run_of(recipe), tmp_path, tmp_path / "export", merged=True, policy=still)
    both = {**small("eval=null", "save.best_metric=reward"), "resume": "auto"}
    place = f"policies.{still}.algorithm"
    with pytest.raises(CheckpointError, match=f"the checkpoint was saved by algorithm None for {place}, this recipe"):
        run(both, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_policy_is_refused(small, tmp_path):
    recipe = small("policies.painter.trains=false", "eval=null", "save.best_metric=reward", "num_rollouts=1")
    run(recipe, tmp_path)
    both = small("eval=null", "save.best_metric=reward")
    wrong = "holds the policies writer; this run trains painter, writer. Resume with the policies that trained"
    with pytest.raises(CheckpointError, match=wrong):
        evaluate_recipe(run_of(small()), tmp_path, checkpoint="newest")
    with pytest.raises(CheckpointError, match=wrong):
        export_recipe(run_of(both), tmp_path, tmp_path / "export", merged=True, policy="painter")


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_of_two_cores")
def test_one_worker_and_two_agree(small, tmp_path):
    recipe = small("eval=null", "save.best_metric=reward", "media_interval=0", "num_rollouts=1", "batch_size=4")
    _, local = run(recipe, tmp_path / "local")
    _, two = run({**recipe, "runtime": "ray", "num_devices": 2}, tmp_path / "two")
    assert set(local[1]) == set(two[1])
    # Rollouts are equal bit for bit; what training measures differs by the order of sums over two devices.
    exact = [
        name for name in local[1] if name.startswith(("reward/", "image/reward/", "group/", "text/", "image/group"))
    ]
    assert {name: two[1][name] for name in exact} == {name: local[1][name] for name in exact} and len(exact) > 10
    for name, value in local[1].items():
        if name.endswith(("policy/loss", "train/grad_norm")):
            assert two[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


@pytest.mark.matrix
def test_both_are_pushed_to_engines_with_copies_of_the_models(small, tmp_path):
    recipe = small("eval=null", "save.best_metric=reward", "media_interval=0")
    push_to_copies(recipe)
    _, pushed = run(recipe, tmp_path / "pushed")
    _, direct = run(small("eval=null", "save.best_metric=reward", "media_interval=0"), tmp_path / "direct")
    assert pushed[2]["writer/sync/logprob_gap_max"] < 1e-4
    assert pushed[2]["painter/sync/tensors"] > pushed[2]["writer/sync/tensors"] > 0
    same = ("reward/mean", "image/reward/mean", "text/rollout/fallback")
    assert {name: pushed[2][name] for name in same} == {name: direct[2][name] for name in same}
