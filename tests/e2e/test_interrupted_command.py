"""The command, interrupted as a cluster would: it saves, ends, and goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from small import SMALL

from unirl.app.main import main

pytestmark = pytest.mark.slow
ARGUMENTS = ["diffusion/sd3_shapes_flowgrpo", *SMALL, "num_rollouts=4", "trackers.tensorboard.enabled=false"]


def command(*extra):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "unirl.app.main", *ARGUMENTS, *extra],
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


def finished(process, timeout_s=240):
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def in_this_process(*extra):
    assert main([*ARGUMENTS, *extra]) == 0


def test_terminated_and_resumed_equals_uninterrupted(tmp_path, own_process):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = command(f"run_dir={parts}")
    in_this_process(f"run_dir={whole}")
    deadline = time.monotonic() + 120
    metrics = parts / "metrics.jsonl"
    while time.monotonic() < deadline and (not metrics.exists() or len(metrics.read_text().splitlines()) < 2):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    finished(process)
    stopped = json.loads((parts / "summary.json").read_text())
    assert not stopped["is_complete"] and 0 < stopped["num_rollouts"] < 4
    in_this_process(f"run_dir={parts}", "resume=auto")
    resumed = json.loads((parts / "summary.json").read_text())
    assert resumed["is_complete"] and resumed["num_rollouts"] == 4
    assert records(parts) == records(whole)
    assert resumed["eval_after"] == json.loads((whole / "summary.json").read_text())["eval_after"]
