"""The command, interrupted as a cluster would: it saves, ends, and goes on as if nothing had happened."""

import json
import os
import subprocess
import sys

import pytest
from small import SMALL

from unirl.app.main import main

pytestmark = pytest.mark.slow
ARGUMENTS = ["diffusion/sd3_shapes_flowgrpo", *SMALL, "num_rollouts=4", "trackers.tensorboard.enabled=false"]


INTERRUPTED = """
import os, signal, sys
from unirl.app.main import main
from unirl.tracking.jsonl import JsonlTracker
log = JsonlTracker.log
def log_and_terminate(tracker, metrics, step):
    log(tracker, metrics, step)
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
JsonlTracker.log = log_and_terminate
sys.exit(main(sys.argv[1:]))
"""
"""The command, which gets SIGTERM after its first rollout, however busy the machine is."""


def interrupted(*extra):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *ARGUMENTS, *extra],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def records(run_dir):
    """Metrics by step, without what depends on the clock."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {name: value for name, value in record.items() if not name.startswith(("timing_s/", "perf/"))}
        found[record["step"]] = {name: value for name, value in kept.items() if "time" not in name}
    return found


def finished(process, timeout_s=600):
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def in_this_process(*extra):
    assert main([*ARGUMENTS, *extra]) == 0


def test_terminated_and_resumed_equals_uninterrupted(tmp_path, own_process):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = interrupted(f"run_dir={parts}")
    in_this_process(f"run_dir={whole}")
    finished(process)
    stopped = json.loads((parts / "summary.json").read_text())
    assert not stopped["is_complete"] and 0 < stopped["num_rollouts"] < 4
    in_this_process(f"run_dir={parts}", "resume=auto")
    resumed = json.loads((parts / "summary.json").read_text())
    assert resumed["is_complete"] and resumed["num_rollouts"] == 4
    assert records(parts) == records(whole)
    assert resumed["eval_after"] == json.loads((whole / "summary.json").read_text())["eval_after"]
