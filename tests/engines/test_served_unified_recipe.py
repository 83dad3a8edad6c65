"""The recipe whose thoughts are written where it trains and whose images vLLM-Omni draws, as a user runs it."""

import pytest
from recipe_runs import finish, records, train
from served_engines import SERVED

pytestmark = [pytest.mark.vllm_omni, pytest.mark.slow]
NUM_ROLLOUTS = 2
SMALL = [
    f"num_rollouts={NUM_ROLLOUTS}",
    "batch_size=2",
    "stages.text.sampling.samples_per_prompt=2",
    "stages.image.sampling.samples_per_prompt=2",
    "stack.micro_batch_size=8",
    "stack.num_updates_per_batch=2",
    "eval.interval=0",
    "guardrails.action=off",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "served"
    python = SERVED["vllm_omni"].python
    finish(train(run_dir, "worlds/thoughts/vllm_omni", f"stages.image.engine.python={python}", *SMALL), run_dir)
    return records(run_dir)


@pytest.fixture(scope="module")
def direct_run(tmp_path_factory):
    """The same by the model that trains, for both tracks."""
    run_dir = tmp_path_factory.mktemp("runs") / "direct"
    words = [
        "stages.image.engine._target_=unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine",
        *(f"~stages.image.engine.{name}" for name in ("model", "python", "dtype")),
        "~sync",
    ]
    finish(train(run_dir, "worlds/thoughts/vllm_omni", *words, *SMALL), run_dir)
    return records(run_dir)


def test_it_trains_on_the_samples_of_direct_sampling(run, direct_run):
    """The same thoughts, and the same images up to what float32 rounds in another order."""
    for step in range(1, NUM_ROLLOUTS + 1):
        assert abs(run[step]["reward/mean"] - direct_run[step]["reward/mean"]) < 0.01


def test_every_rollout_is_of_the_present_policy_and_says_how_far_a_replay_is(run):
    pushes = [record["sync/logprob_gap_max"] for record in run.values() if "sync/logprob_gap_max" in record]
    assert len(pushes) == NUM_ROLLOUTS and max(pushes) < 2e-5
    for step in range(1, NUM_ROLLOUTS + 1):
        record = run[step]
        assert record["image/mismatch/logp_absdiff/max"] < 2e-5
        assert record["image/policy/first_ratio_max_abs_dev"] == record["text/policy/first_ratio_max_abs_dev"] == 0.0
