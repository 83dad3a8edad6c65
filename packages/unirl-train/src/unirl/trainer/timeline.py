"""The timeline of a run as a file: a line per span of work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.distributed.spans import Span
from unirl.tracking.jsonl import lines_up_to

Line = dict[str, Any]  # Any: JSON values

logger = logging.getLogger(__name__)

TIMELINE = "timeline.jsonl"
MAX_BYTES = 64 << 20


class Timeline:
    """Appends spans to a file, in seconds since the epoch. Above `max_bytes` the older half of the file goes.

    A file that cannot be written is said once; the run continues without it.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._epoch = time.time() - time.monotonic()
        self._has_failed = False

    def start(self, step: int | None) -> None:
        """Drop the lines after `step`, from where a run is resumed; all for a new run (None)."""
        if step is None:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._replace(lines_up_to(self._path, step))

    def write(self, spans: Sequence[Span], step: int) -> list[Line]:
        """Append the spans that ended before the metrics of `step` were logged; returns their lines."""
        added = [self._line(span, step) for span in spans]
        if not added:
            return []
        text = "".join(json.dumps(line) + "\n" for line in added)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                size = file.tell()
            if size > self._max_bytes:
                lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
                self._replace(lines[len(lines) // 2 :])
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.error("the timeline cannot be kept: %s. The run continues without it.", error)
            self._has_failed = True
        return added

    def _replace(self, lines: Sequence[str]) -> None:
        partial = self._path.with_suffix(".tmp")
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        partial.replace(self._path)

    def _line(self, span: Span, step: int) -> Line:
        begin, end = round(self._epoch + span.begin, 4), round(self._epoch + span.end, 4)
        return {"step": step, "lane": span.lane, "what": span.what, "begin": begin, "end": end, **span.about}
