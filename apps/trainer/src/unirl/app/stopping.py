"""The first SIGINT or SIGTERM ends a run after its current step, with a checkpoint; the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Generator[threading.Event]:
    """An event that the first signal sets. Handlers are restored on leaving; outside the main thread there are none."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
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
