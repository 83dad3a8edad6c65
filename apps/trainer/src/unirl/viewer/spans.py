"""The timeline of a run: spans within a window, no more than can be seen."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

Json = dict[str, Any]  # Any: JSON values
MAX_SPANS = 4000
USUAL_ROLLOUTS = 6
"""Rollouts that a page begins with."""


class SpanLine(msgspec.Struct):
    """A line of timeline.jsonl."""

    step: int
    lane: str
    what: str
    begin: float
    end: float
    rollout: int | None = None
    request: int | None = None
    version: int | None = None


class TimelineFile:
    """The spans of one run, read once and then by what is appended. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._lines: list[SpanLine] = []
        self._begin, self._end, self._step = array("d"), array("d"), array("q")
        self._offset, self._guard = 0, b""

    def refresh(self) -> None:
        """Read what is new. A file that is not there has no spans."""
        decoder = msgspec.json.Decoder(SpanLine)
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._guard)))
                if os.fstat(file.fileno()).st_size < self._offset or file.read(len(self._guard)) != self._guard:
                    self._forget()
                    file.seek(0)
                read = file.read()
        except FileNotFoundError:
            self._forget()
            return
        whole = read[: read.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                span = decoder.decode(line)
            except msgspec.MsgspecError:
                continue
            self._lines.append(span)
            self._begin.append(span.begin)
            self._end.append(span.end)
            self._step.append(span.step)
        self._offset += len(whole)
        self._guard = (self._guard + whole)[-64:]

    def window(self, least: float | None, most: float | None) -> Json:
        """Spans that overlap [least, most] in seconds since the first one; without bounds those of the last rollouts.

        Where they are too many the longest stay, and `num_left_out` says how many do not.
        """
        begin, end = np.array(self._begin), np.array(self._end)
        if not len(begin):
            return {"spans": [], "lanes": [], "length": 0, "from": 0, "to": 0, "num_left_out": 0, "start": None}
        start, length = float(begin.min()), float(end.max() - begin.min())
        if least is None or most is None:
            steps = np.array(self._step)
            recent = begin[steps > steps.max() - USUAL_ROLLOUTS]
            least, most = float(recent.min() - start), length
        chosen = np.flatnonzero((end - start >= least) & (begin - start <= most))
        num_left = max(0, len(chosen) - MAX_SPANS)
        if num_left:
            chosen = np.sort(chosen[np.argsort(begin[chosen] - end[chosen])[:MAX_SPANS]])
        spans = [self._lines[place] for place in chosen.tolist()]
        return {
            "start": start,
            "length": length,
            "from": least,
            "to": most,
            "num_left_out": num_left,
            "lanes": lanes(spans, start + least, start + most),
            "spans": [
                [span.lane, span.what, span.begin - start, span.end - start, span.rollout, span.request, span.version]
                for span in spans
            ],
        }


def lanes(spans: list[SpanLine], least: float, most: float) -> list[Json]:
    """By lane, the loop's parts first: the fraction of the window in which something ran, and seconds by kind."""
    found: dict[str, list[SpanLine]] = {}
    for span in spans:
        found.setdefault(span.lane, []).append(span)
    first = {"engine": 0, "reward": 1, "learner": 2}
    names = sorted(found, key=lambda lane: (first.get(lane, 3), len(lane), lane))
    return [{"name": lane, "busy": busy(found[lane], least, most), "seconds": _seconds(found[lane])} for lane in names]


def busy(spans: list[SpanLine], least: float, most: float) -> float:
    """Fraction of a window that any of the spans covers."""
    covered, until = 0.0, least
    for span in sorted(spans, key=lambda each: each.begin):
        begin, end = max(span.begin, until), min(span.end, most)
        if end > begin:
            covered += end - begin
        until = max(until, min(span.end, most))
    return covered / (most - least) if most > least else 0.0


def _seconds(spans: list[SpanLine]) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in spans:
        found[span.what] = found.get(span.what, 0.0) + span.end - span.begin
    return found
