"""Runs that stop after some rollouts, and their metrics."""

import threading

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


def comparable(metrics):
    """The metrics that do not measure the machine."""
    return {name: value for name, value in metrics.items() if "timing_s/" not in name and "perf/" not in name}
