"""Runs that stop after some rollouts, and their metrics."""

import json
import subprocess
import sys
import threading
from pathlib import Path

from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.trainer.commands import run_recipe


class StopAfter:
    """A tracker that asks the run to stop once a number of rollouts is logged."""

    def __init__(self, after):
        self.stop, self.after, self.records = threading.Event(), after, {}

    def start(self, config, run_dir, step=0):
        pass

    def log(self, metrics, step):
        self.records[step] = metrics
        if step >= self.after:
            self.stop.set()

    def image(self, name, picture, step, captions):
        pass

    def sound(self, name, files, step, captions):
        pass

    def video(self, name, files, step, captions):
        pass

    def table(self, name, rows, step):
        pass

    def alert(self, name, text, step):
        pass

    def finish(self, summary):
        pass

    def close(self):
        pass


def run(recipe, run_dir, after=10**9):
    """The summary and the metrics by rollout."""
    tracker = StopAfter(after)
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_recipe(run_of(recipe), run_dir, [tracker], tracker.stop), tracker.records


def run_on_nodes(recipe, run_dir):
    """Rollout -> `comparable` metrics of a run on as many nodes as the recipe names, whose Ray is another process's."""
    check_recipe(recipe)
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    script = Path(__file__).with_name("on_nodes.py")
    command = [sys.executable, str(script), str(run_dir / "recipe.json"), str(run_dir)]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return {int(step): found for step, found in json.loads((run_dir / "records.json").read_text()).items()}


def comparable(metrics):
    """The metrics that do not measure the machine."""
    return {name: value for name, value in metrics.items() if "timing_s/" not in name and "perf/" not in name}
