"""The recipe with rollouts by the real vLLM, as a user runs it: it learns."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_ROLLOUTS = 8


def train(vllm_python, run_dir, *extra):
    """The command, as a process."""
    settings = [f"engine.python={vllm_python}", f"run_dir={run_dir}", f"num_rollouts={NUM_ROLLOUTS}", "save.interval=0"]
    return subprocess.Popen(
        [sys.executable, "-m", "unirl.app.main", "llm/qwen3_arithmetic_vllm", "seed=0", *settings, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process):
    """Its output. It must end well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def records(run_dir):
    """Metrics by step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def run(vllm_python, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    finished(train(vllm_python, run_dir))
    return run_dir


def test_the_recipe_learns_to_carry(run):
    summary = json.loads((run / "summary.json").read_text())
    before, after = (summary[name]["overall"]["exact_match"] for name in ("eval_before", "eval_after"))
    assert after >= before + 0.25


def test_every_rollout_says_how_far_the_engines_log_probs_are_from_the_trainers(run):
    for step in range(1, NUM_ROLLOUTS + 1):
        record = records(run)[step]
        assert record["mismatch/logp_absdiff/mean"] < 1e-6
        # Of 1,500 tokens; float32 on each side is within 1e-5 of float64 for the worst of them.
        assert record["mismatch/logp_absdiff/max"] < 2e-5
        assert record.get("sync/logprob_gap_max", 0.0) < 1e-5
        assert record["policy/first_ratio_max_abs_dev"] == 0.0
    assert records(run)[1]["mismatch/logp_absdiff/max"] < 1e-5
