"""When parts of a run worked: spans of wall time, as they end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

SHORTEST_S = 1e-3
"""Spans below are not kept: no page could show them, and there are many."""
MOST = 20_000
"""Spans kept between two `take`s; the oldest are dropped, which takes 1,024 workers seven rollouts."""


@dataclass(frozen=True)
class Span:
    """One piece of work."""

    lane: str
    """What did it: a part of the loop, a pool or a member of one."""
    what: str
    """A phase of `PhaseClock`, or a method of a role."""
    begin: float
    """Seconds of time.monotonic on the driver, as is `end`."""
    end: float
    about: Mapping[str, int] = field(default_factory=dict)
    """`rollout`, and of a request of a schedule `request` and `version`."""


class SpanLog:
    """Spans since the last `take`. For any number of threads."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST)

    def add(self, span: Span) -> None:
        """Keep a span that has ended, if it is not too short."""
        if span.end - span.begin >= SHORTEST_S:
            self._spans.append(span)

    @contextmanager
    def span(self, lane: str, what: str, about: Mapping[str, int] | None = None) -> Generator[None]:
        """Inside, work is done."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(Span(lane, what, begin, time.monotonic(), about or {}))

    def take(self) -> list[Span]:
        """Spans since the last call, by their end."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


class ThreadFacts(threading.local):
    """What the present thread is working on, for the spans that it ends."""

    def __init__(self) -> None:
        self.facts: Mapping[str, int] = {}
