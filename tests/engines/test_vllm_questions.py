"""The recipe with questions about images by the real vLLM: images reach it as replay has them."""

import pytest
from recipe_runs import finish, records, train

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_ROLLOUTS = 2
SMALL = [
    f"num_rollouts={NUM_ROLLOUTS}",
    "batch_size=8",
    "eval.num_samples=16",
    "eval.batch_size=16",
    "eval.pass_prompts=4",
    "guardrails.action=off",
]


def test_log_probs_of_answers_to_questions_about_pictures_are_those_of_a_replay(vllm_python, tmp_path):
    run_dir = tmp_path / "run"
    finish(train(run_dir, "worlds/questions/vllm", f"engine.python={vllm_python}", *SMALL), run_dir)
    for step in range(1, NUM_ROLLOUTS + 1):
        record = records(run_dir)[step]
        assert record["mismatch/logp_absdiff/mean"] < 1e-5
        assert record["mismatch/logp_absdiff/max"] < 1e-4
        assert record["policy/first_ratio_max_abs_dev"] == 0.0
