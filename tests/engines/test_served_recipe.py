"""The recipes with images by real engines learn as the model that samples for itself does, also where one is killed."""

import os
import re
import signal
import subprocess
import time

import pytest
from recipe_runs import SMALL_SHAPES, finish, output_of, records, train

pytestmark = [pytest.mark.slow]
NUM_ROLLOUTS = 3
SMALL = (f"num_rollouts={NUM_ROLLOUTS}", *SMALL_SHAPES)


@pytest.fixture(scope="module")
def run(served, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    finish(train(run_dir, served.recipe, f"engine.python={served.python}", *SMALL), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def direct_run(tmp_path_factory):
    """Folder of a run that the model samples itself."""
    run_dir = tmp_path_factory.mktemp("direct") / "direct"
    finish(train(run_dir, "worlds/shapes/flowgrpo", *SMALL), run_dir)
    return run_dir


def test_it_trains_on_the_samples_of_direct_sampling(run, direct_run):
    """The same prompts, noise and weights give the same images, up to what float32 rounds in another order."""
    for step in range(1, NUM_ROLLOUTS + 1):
        found, expected = records(run)[step], records(direct_run)[step]
        assert abs(found["reward/mean"] - expected["reward/mean"]) < 0.01


def test_every_rollout_says_how_far_the_engines_log_probs_are_from_a_replay(run):
    for step in range(1, NUM_ROLLOUTS + 1):
        record = records(run)[step]
        assert record["mismatch/logp_absdiff/max"] < 2e-5
        assert record["policy/first_ratio_max_abs_dev"] == 0.0


def test_a_run_whose_engine_is_killed_goes_on_as_if_it_had_not_been(run, served, tmp_path):
    run_dir = tmp_path / "killed"
    words = [served.recipe, f"engine.python={served.python}", "engine.num_instances=2"]
    process = train(run_dir, *words, *SMALL, "engine.forward_batch_size=16")
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 600
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None and time.monotonic() < deadline, output_of(run_dir)
        time.sleep(0.05)
    engines = re.findall(r"is up \(pid (\d+)\)", output_of(run_dir))
    assert len(engines) == 2
    killed = engines[:1]
    if served.has_workers:
        killed = subprocess.run(["pgrep", "-P", engines[0]], capture_output=True, text=True, check=True).stdout.split()
    for pid in killed:
        os.kill(int(pid), signal.SIGKILL)
    finish(process, run_dir)
    said = output_of(run_dir)
    assert "took the place of a dead process" in said
    assert re.search(r"exit code -9\) is dead" if served.has_workers else r"ended by signal 9", said)
    for step in range(1, NUM_ROLLOUTS + 1):
        # Batches of another size round differently; a sample that was lost or made twice would change the mean by more.
        assert abs(records(run_dir)[step]["reward/mean"] - records(run)[step]["reward/mean"]) < 0.01
