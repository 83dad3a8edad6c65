"""The log of the server and of its replicas: strangers cannot fill the disk with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_RECORDS = 20
WINDOW_S = 60.0


def start_logging() -> None:
    """One line an event on standard error, no line of the code more than MAX_RECORDS times in WINDOW_S seconds."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimit())


@dataclass
class _Window:
    since: float
    num: int = 0


class RateLimit(logging.Filter):
    """Leaves out what one line of the code logs more often than that, and says how much it left out.

    now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._now()
        window = self._windows.setdefault((record.pathname, record.lineno), _Window(now))
        if now - window.since >= WINDOW_S:
            if window.num > MAX_RECORDS:
                _add(record, f"{window.num - MAX_RECORDS} more like this were left out")
            window.since, window.num = now, 0
        window.num += 1
        if window.num == MAX_RECORDS:
            _add(record, f"more like this are left out for {WINDOW_S - (now - window.since):.0f} s")
        return window.num <= MAX_RECORDS


def _add(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({text})", ()
