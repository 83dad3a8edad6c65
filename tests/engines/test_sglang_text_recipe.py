"""The recipe with texts by the real SGLang, as a user runs it: it learns, and its log-probs are the trainer's."""

import pytest
from recipe_runs import exact_match, finish, output_of, records, train

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.nightly]  # as of vLLM
NUM_ROLLOUTS = 6


@pytest.fixture(scope="module")
def run(sglang_python, tmp_path_factory):
    """Folder of a run."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    words = ["worlds/arithmetic/sglang", f"engine.python={sglang_python}", f"num_rollouts={NUM_ROLLOUTS}"]
    finish(train(run_dir, *words), run_dir)
    return run_dir


def test_the_recipe_learns_to_carry(run):
    before, after = exact_match(run)
    assert after >= before + 0.15
    assert "SGLang 0.5.23 is up" in output_of(run)


def test_every_rollout_says_how_far_the_engines_log_probs_are_from_the_trainers(run):
    for step in range(1, NUM_ROLLOUTS + 1):
        record = records(run)[step]
        assert record["mismatch/logp_absdiff/mean"] < 1e-6
        assert record["mismatch/logp_absdiff/max"] < 2e-5
        assert record.get("sync/logprob_gap_max", 0.0) < 1e-5
        assert record["policy/first_ratio_max_abs_dev"] == 0.0
