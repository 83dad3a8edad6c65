"""Stopping and resuming is as if the run had never stopped, whatever stopped it."""

import threading

import pytest
import torch

from unirl.trainer.wiring import run_recipe
from unirl.types.storage import load_rollout

pytestmark = pytest.mark.slow


class StopAfter:
    """A tracker that asks the run to stop once a number of rollouts is logged."""

    def __init__(self, event, after):
        self.event, self.after, self.records = event, after, {}

    def start(self, config, run_dir, step=0):
        pass

    def log(self, metrics, step):
        self.records[step] = metrics
        if step >= self.after:
            self.event.set()

    def image(self, name, picture, step, captions):
        pass

    def video(self, name, files, step, captions):
        pass

    def table(self, name, rows, step):
        pass

    def finish(self, summary):
        pass

    def close(self):
        pass


def run(recipe, run_dir, after=10**9):
    event = threading.Event()
    tracker = StopAfter(event, after)
    run_dir.mkdir(parents=True, exist_ok=True)
    summary = run_recipe(recipe, run_dir, [tracker], event)
    return summary, tracker.records


def comparable(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}


@pytest.mark.parametrize(("name", "is_async"), [("sd3_shapes", False), ("sd3_shapes_flowgrpo", True)])
def test_two_plus_two_rollouts_equal_four(name, is_async, recipe, tmp_path):
    small = recipe(name, "num_rollouts=4", f"save.is_async={str(is_async).lower()}")
    whole_dir, parts_dir = tmp_path / "whole", tmp_path / "parts"
    whole, whole_records = run({**small, "engine": {**small["engine"], "dump_dir": str(whole_dir / "dump")}}, whole_dir)
    parts = {**small, "engine": {**small["engine"], "dump_dir": str(parts_dir / "dump")}}
    first, first_records = run(parts, parts_dir, after=2)
    assert first["num_rollouts"] == 2 and not first["is_complete"]
    second, second_records = run({**parts, "resume": "auto"}, parts_dir)
    assert second["num_rollouts"] == 4 and second["is_complete"]
    joined = {**first_records, **second_records}
    for step in (1, 2, 3, 4):
        assert comparable(joined[step]) == comparable(whole_records[step]), step
    assert second["eval_after"] == whole["eval_after"]
    for rollout in range(4):
        file = f"rollout-{rollout:06d}-rank0.safetensors"
        ours, _ = load_rollout(parts_dir / "dump" / file)
        theirs, _ = load_rollout(whole_dir / "dump" / file)
        assert ours.equals(theirs), rollout
    assert torch.get_default_dtype() is torch.float32
