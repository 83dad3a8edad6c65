"""The recipe of letters with a crop by the real vLLM: images of later turns reach it as replay has them."""

import json

import pytest
from recipe_runs import finish, records, train

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_ROLLOUTS = 2
SMALL = [
    f"num_rollouts={NUM_ROLLOUTS}",
    "batch_size=8",
    "eval.num_samples=16",
    "eval.batch_size=16",
    "guardrails.action=off",
    "media_interval=1",
]


def test_log_probs_of_turns_behind_a_crop_are_those_of_a_replay(vllm_python, tmp_path):
    run_dir = tmp_path / "run"
    finish(train(run_dir, "worlds/zoom/vllm", f"engine.python={vllm_python}", *SMALL), run_dir)
    for step in range(1, NUM_ROLLOUTS + 1):
        record = records(run_dir)[step]
        assert record["text/rollout/calls"] > 0
        assert record["mismatch/logp_absdiff/mean"] < 1e-5
        assert record["mismatch/logp_absdiff/max"] < 1e-4
        assert record["policy/first_ratio_max_abs_dev"] == 0.0
    lines = (run_dir / "samples" / "rollout-000001.jsonl").read_text().splitlines()
    shown = [len(json.loads(line)["given"]) for line in lines]
    assert max(shown) >= 1
