"""A tool that kills the process over its own, once, for tests of members that hold environments."""

import os
import signal
from pathlib import Path

from unirl.trainer.scaling import ask_for_sizes
from unirl.worlds.tools.world import Adder


class KillingAdder(Adder):
    """Adds. Its first call in a run also asks for a second member, and kills the member that holds its process.

    marks: the folder of the run, where it leaves a file then.
    """

    deterministic = True

    def __init__(self, marks):
        self._run_dir = Path(marks)

    def __call__(self, arguments, task):
        mark = self._run_dir / "killed"
        if not mark.exists():
            mark.touch()
            ask_for_sizes(self._run_dir, {"env": 2})
            os.kill(os.getppid(), signal.SIGKILL)
        return super().__call__(arguments, task)
