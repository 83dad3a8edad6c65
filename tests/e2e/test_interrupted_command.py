"""The command, interrupted as a cluster would: it saves, ends, and goes on as if nothing had happened."""

import importlib
import json
import os
import signal
import sys
from typing import Any

import pytest
import torch
from small import SMALL

from unirl.app.main import main
from unirl.tracking.jsonl import JsonlTracker

ranks_of_train: Any = importlib.import_module("ranks")
pytestmark = pytest.mark.slow
ARGUMENTS = ["worlds/shapes/flowgrpo", *SMALL, "num_rollouts=3", "trackers.tensorboard.enabled=false"]


def interrupted(folder, words):
    """The command, which gets SIGTERM after its first rollout, however busy the machine is; its status in a file."""
    log = JsonlTracker.log

    def log_and_terminate(tracker, metrics, step):
        log(tracker, metrics, step)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(JsonlTracker, "log", log_and_terminate)  # noqa: B010 (its own process)
    torch.set_num_threads(1)
    with (folder / "output").open("w") as sys.stderr:
        (folder / "status").write_text(str(main(words)))


def records(run_dir):
    """Metrics by step, without what depends on the clock."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {name: value for name, value in record.items() if not name.startswith(("timing_s/", "perf/"))}
        found[record["step"]] = {name: value for name, value in kept.items() if "time" not in name}
    return found


def in_this_process(*extra):
    assert main([*ARGUMENTS, *extra]) == 0


def test_terminated_and_resumed_equals_uninterrupted(tmp_path, own_process):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # A separate process, since signals belong to a process, forked from one that has imported everything.
    process = ranks_of_train.forkserver().Process(target=interrupted, args=(tmp_path, [*ARGUMENTS, f"run_dir={parts}"]))
    process.start()
    in_this_process(f"run_dir={whole}")
    process.join(600)
    assert process.exitcode == 0 and (tmp_path / "status").read_text() == "0", (tmp_path / "output").read_text()
    stopped = json.loads((parts / "summary.json").read_text())
    assert not stopped["is_complete"] and 0 < stopped["num_rollouts"] < 3
    in_this_process(f"run_dir={parts}", "resume=auto")
    resumed = json.loads((parts / "summary.json").read_text())
    assert resumed["is_complete"] and resumed["num_rollouts"] == 3
    assert records(parts) == records(whole)
    assert resumed["eval_after"] == json.loads((whole / "summary.json").read_text())["eval_after"]
