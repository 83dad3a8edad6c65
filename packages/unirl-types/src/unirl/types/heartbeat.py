"""Signs of life: what a process is doing, as a second thread of it says, and how long it has been silent."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

BEAT_S = 10.0
"""Seconds between two signs of life."""
SILENT_S = 60.0
"""After so many seconds without one, a warning names the process; again after each doubling."""
STACK_DEPTH = 12
"""Innermost frames in a report."""


@dataclass(frozen=True)
class Report:
    """What a process is doing at this moment."""

    doing: str | None
    """The call that runs; None: none."""
    since_s: float
    """Seconds since that call began."""
    stack: str
    """Innermost frames of the thread that runs it."""

    def __str__(self) -> str:
        what = "waits for a call" if self.doing is None else f"in {self.doing} for {self.since_s:.0f} s"
        return f"{what}, at\n{self.stack}" if self.doing else what


class Activity:
    """Notes the call that runs, for a second thread that reports it."""

    def __init__(self) -> None:
        self._running: tuple[str, float, int] | None = None
        """Name, start and thread of the call that runs."""

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Inside, the present thread runs this call."""
        self._running = what, time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._running = None

    def report(self) -> Report:
        """What runs, since when and where."""
        running = self._running
        if running is None:
            return Report(None, 0.0, "")
        what, start, thread = running
        frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, though it has an underscore
        stack = "".join(traceback.format_stack(frame)[-STACK_DEPTH:]) if frame is not None else ""
        return Report(what, time.monotonic() - start, stack.rstrip())


class Heartbeat:
    """The signs of life of one process, as another one hears them. name: the process, in warnings."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._heard = time.monotonic()
        self._last: Report | None = None
        self._told_s = 0.0
        """Seconds of silence of the last warning; 0 while the process beats."""

    def beat(self, report: Report) -> None:
        """The process has given a sign of life."""
        self._heard, self._last, self._told_s = time.monotonic(), report, 0.0

    def silence(self) -> str | None:
        """A warning if the process has been silent for `SILENT_S` seconds, or twice as long as in the last warning."""
        seconds = time.monotonic() - self._heard
        if seconds < max(SILENT_S, 2 * self._told_s):
            return None
        self._told_s = seconds
        return f"{self._name} has given no sign of life for {seconds:.0f} s. {self.last}"

    @property
    def report(self) -> Report | None:
        """The last report; None before the first."""
        return self._last

    @property
    def last(self) -> str:
        """What the process was doing when it was heard last."""
        if self._last is None:
            return "It has given none yet."
        return f"It was last heard {time.monotonic() - self._heard:.0f} s ago: {self._last}"
