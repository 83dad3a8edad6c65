"""Scoring while the engine generates gives the run that scoring afterwards gives, bit for bit."""

import functools
import threading

import pytest
import torch

from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.wiring import build_components, make_evaluator, make_trainer

# 16 samples in chunks of 3 for a scorer that takes 4: no chunk is a batch.
SIZES = ["engine.forward_batch_size=3", "reward.scorers.shapes.batch_size=4", "stack.num_updates_per_batch=1"]
COMPARED = ("reward/", "advantage/", "policy/", "train/", "group/", "eval/")
KEEPS_UP = ("reward/async/", "reward/shapes/utilisation")


def two_rollouts(recipe, run_dir, num_devices):
    """Metrics and rewards of two rollouts, and of an evaluation after them."""
    run_dir.mkdir()
    builder = functools.partial(build_components, recipe, str(run_dir))
    if num_devices == 0:
        runtime = LocalRuntime(builder)
    else:
        from unirl.distributed.group.ray_runtime import RayRuntime

        runtime = RayRuntime(builder, num_devices=num_devices)
    metrics = []
    with runtime:
        trainer = make_trainer(recipe, runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        metrics = [trainer.step(rollout_id) for rollout_id in range(2)]
        evaluator = make_evaluator(recipe)
        assert evaluator is not None
        metrics.append(evaluator.run(runtime.role("engine"), runtime.role("reward"), runtime.num_ranks).metrics())
        req = trainer.request(2, recipe["batch_size"])
        with runtime.role("engine").generate(req, policy=runtime.role("stack").rollout_policy()) as resp:
            reply = runtime.role("reward").score_and_attach(resp, req)
    return metrics, reply


def compare(make_recipe, tmp_path, num_devices):
    later = make_recipe("sd3_shapes", *SIZES)
    meanwhile = make_recipe("sd3_shapes", *SIZES, "+reward.is_async=true")
    expected, expected_reply = two_rollouts(later, tmp_path / "later", num_devices)
    got, reply = two_rollouts(meanwhile, tmp_path / "meanwhile", num_devices)
    for ours, theirs in zip(got, expected, strict=True):
        new = {name for name in ours if name.startswith(KEEPS_UP)}
        values = {name: value for name, value in ours.items() if name.startswith(COMPARED) and name not in new}
        assert values == {name: value for name, value in theirs.items() if name.startswith(COMPARED)}
    assert torch.equal(reply.rewards, expected_reply.rewards) and reply.sample_ids == expected_reply.sample_ids
    assert 0 < got[0]["reward/shapes/utilisation"] <= 1 and got[0]["reward/async/latency_s/max"] > 0


@pytest.mark.slow
def test_async_rewards_train_alike_in_one_process(recipe, tmp_path):
    compare(recipe, tmp_path, 0)


@pytest.mark.ray
@pytest.mark.slow
def test_async_rewards_train_alike_on_two_ray_workers(recipe, ray_of_two_cores, tmp_path):
    compare(recipe, tmp_path, 2)
