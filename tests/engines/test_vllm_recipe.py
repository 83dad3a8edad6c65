"""The recipe with rollouts by the real vLLM, as a user runs it: it learns, also where its engine is killed."""

import os
import re
import signal
import time

import pytest
from recipe_runs import exact_match, finish, output_of, records, train, untimed

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_ROLLOUTS = 8


def words(vllm_python):
    """What is run."""
    return ["worlds/arithmetic/vllm", f"engine.python={vllm_python}", f"num_rollouts={NUM_ROLLOUTS}"]


@pytest.fixture(scope="module")
def run(vllm_python, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    finish(train(run_dir, *words(vllm_python)), run_dir)
    return run_dir


def test_the_recipe_learns_to_carry(run):
    before, after = exact_match(run)
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


def test_a_run_whose_engine_is_killed_goes_on_as_if_it_had_not_been(run, vllm_python, tmp_path):
    run_dir = tmp_path / "killed"
    process = train(run_dir, *words(vllm_python))
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline, output_of(run_dir)
        time.sleep(0.01)
    engine = re.search(r"is up \(pid (\d+)\)", output_of(run_dir))
    assert engine is not None
    os.kill(int(engine[1]), signal.SIGKILL)
    finish(process, run_dir)
    said = output_of(run_dir)
    assert said.count("took the place of a dead process") == 1 and "ended by signal 9" in said
    assert untimed(records(run_dir)) == untimed(records(run))
