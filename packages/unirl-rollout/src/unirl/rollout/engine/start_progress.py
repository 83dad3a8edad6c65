"""Logs progress while an engine's process loads its model, which takes a minute or more."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PERIOD_S = 15.0
_TAIL_BYTES = 2000
_MAX_CHARACTERS = 120


@contextmanager
def start_progress(name: str, log: Path) -> Generator[None]:
    """Context that logs one line at once and one every `PERIOD_S`: what starts, for how long, and the last line of its
    log.

    name: of engine and process, as errors call them.
    """
    ended, begin = threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(PERIOD_S):
            logger.info("%s has been starting for %.0f s: %s", name, time.monotonic() - begin, last_line(log))

    logger.info("%s starts and loads its model; its log is %s", name, log)
    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


def last_line(log: Path) -> str:
    """The last non-empty line of a log, cut to fit a terminal; empty if there is none."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        # Progress bars go back to the start of their line.
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip()[:_MAX_CHARACTERS] for line in reversed(lines) if line.strip()), "")
    return ""
