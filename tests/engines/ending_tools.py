"""A tool that ends what plays it: one of its calls in a run kills its process, and a later one the member over that."""

import os
import signal
from pathlib import Path

from unirl.worlds.tools.world import Adder

ENDS_PROCESS, ENDS_MEMBER = 2, 6
"""Which call of the run does, counted from 1."""


class EndingAdder(Adder):
    """Adds. calls: a file that has a byte for each call."""

    deterministic = True

    def __init__(self, calls):
        self._calls = Path(calls)

    def __call__(self, arguments, task):
        with self._calls.open("ab") as calls:
            calls.write(b".")
            number = calls.tell()
        if number in (ENDS_PROCESS, ENDS_MEMBER):
            os.kill(os.getpid() if number == ENDS_PROCESS else os.getppid(), signal.SIGKILL)
        return super().__call__(arguments, task)
