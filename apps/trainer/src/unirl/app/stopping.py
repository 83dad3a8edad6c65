"""The first SIGINT or SIGTERM ends a run after its current step, with a checkpoint; a later one ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_S = 1.0
"""A signal so soon after the first is the same one: sent to a group of processes, it comes once more through uv."""


@contextmanager
def stop_on_signals() -> Generator[threading.Event]:
    """An event that the first signal sets. Handlers are restored on leaving; outside the main thread there are none."""
    stop = threading.Event()
    first_s = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if stop.is_set():
            if time.monotonic() - first_s < SAME_S:
                return
            sys.stderr.write(f"\n{signal.Signals(number).name}: stopped at once; nothing was saved since\n")
            sys.stderr.flush()
            os._exit(128 + number)
        first_s = time.monotonic()
        stop.set()
        sys.stderr.write(
            f"\n{signal.Signals(number).name}: stopping after this step and saving a checkpoint; "
            "once more to stop at once\n"
        )

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
