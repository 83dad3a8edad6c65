"""Recipes as a user runs them: the command as a process, what it says and what it measures."""

import json
import os
import subprocess
import sys

SMALL_SHAPES = (
    "batch_size=4",
    "sampling.samples_per_prompt=8",
    "stack.micro_batch_size=16",
    "stack.num_updates_per_batch=2",
    "engine.forward_batch_size=32",
    "eval.num_samples=8",
    "eval.batch_size=8",
    "samples.per_evaluation=4",
    "guardrails.action=off",
)
"""What makes a recipe of the shapes world small enough for a test of a served engine."""


def train(run_dir, *words):
    """The command as a process that writes its output next to the run directory."""
    output = run_dir.with_suffix(".output").open("a")
    return subprocess.Popen(
        [sys.executable, "-m", "unirl.app.main", *words, "seed=0", f"run_dir={run_dir}", "save.interval=0"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def output_of(run_dir):
    """What the runs in a folder have said."""
    return run_dir.with_suffix(".output").read_text()


def finish(process, run_dir):
    """Wait for the end of a run that ends well; none is left behind where it does not end."""
    try:
        assert process.wait(600) == 0, output_of(run_dir)
    finally:
        process.kill()


def records(run_dir):
    """Metrics by step."""
    return {record["step"]: record for record in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


def untimed(found):
    """Metrics by step but the times, which no two runs share."""
    return {
        step: {key: value for key, value in record.items() if not key.startswith(("timing", "perf", "sync/s"))}
        for step, record in found.items()
    }


def exact_match(run_dir):
    """Held-out share of right answers before and after a run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return tuple(summary[name]["overall"]["exact_match"] for name in ("eval_before", "eval_after"))
