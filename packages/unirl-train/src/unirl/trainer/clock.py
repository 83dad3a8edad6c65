"""Measures wall and CPU seconds of a run by phase."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from unirl.distributed.spans import Span, SpanLog, ThreadFacts

MOVING = "residency"
"""The phase of moving components between host and device for the next phase."""
TRAINING = ("sync", "rollout", "reward", "train", "other", MOVING)
"""The phases of a training step; evaluations and checkpoints are not among them."""

LANES = {"rollout": "engine", "reward": "reward"}
"""Part of the loop that a phase is the work of; the learner's are the others."""
LEARNER = "learner"


class PhaseClock:
    """Adds up the seconds of named phases. Phases do not nest. Those of several threads may overlap: seconds count once
    for each name, and CPU seconds for every name that is under way.

    observer: context entered around every phase, given its name (benchmarks count operations with it).
    """

    def __init__(self, observer: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        self.observer = observer
        self.before: Callable[[str], None] | None = None
        """Called with the name of every phase before it; its seconds count as the phase `MOVING`."""
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self._counted: dict[str, tuple[float, float]] = {}
        """Wall and CPU time up to which a phase that is under way is counted."""
        self._adding = threading.Lock()
        self.spans = SpanLog()
        """Every phase, when it was."""
        self._thread = ThreadFacts()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Context that is timed."""
        if self.before is not None:
            with self._timed(MOVING):
                self.before(name)
        with self._timed(name):
            yield

    @contextmanager
    def about(self, **facts: int) -> Generator[None]:
        """Inside, phases of this thread are about this, which their spans say."""
        before = self._thread.facts
        self._thread.facts = facts
        try:
            yield
        finally:
            self._thread.facts = before

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        begin = time.monotonic()
        self._count(name, 1)
        try:
            with nullcontext() if self.observer is None else self.observer(name):
                yield
        finally:
            facts = self._thread.facts
            # What else is done for a request, such as drawing its noise, is work of the engine's thread.
            lane = LANES.get(name, LANES["rollout"] if "request" in facts else LEARNER)
            self.spans.add(Span(lane, name, begin, time.monotonic(), facts))
            self._count(name, -1)

    def _count(self, name: str, change: int) -> None:
        """Add what has passed of a phase, which one more thread begins or ends."""
        with self._adding:
            now = time.monotonic(), time.process_time()
            if self._under_way[name]:
                wall, cpu = (after - before for after, before in zip(now, self._counted[name], strict=True))
                self.wall_s[name] = self.wall_s.get(name, 0.0) + wall
                self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu
                self._step[name] = self._step.get(name, 0.0) + wall
            self._counted[name] = now
            self._under_way[name] += change

    @property
    def training_cpu_s(self) -> float:
        """CPU seconds of this process in training phases so far."""
        return sum(self.cpu_s.get(name, 0.0) for name in TRAINING)

    def step_metrics(self) -> dict[str, float]:
        """Wall seconds by phase since the last call, as `timing_s/<phase>`."""
        with self._adding:
            metrics = {f"timing_s/{name}": seconds for name, seconds in self._step.items()}
            self._step = {}
        return metrics

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Totals so far."""
        return {"wall_s": dict(self.wall_s), "cpu_s": dict(self.cpu_s)}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Continue from earlier totals."""
        self.wall_s = dict(state["wall_s"])
        self.cpu_s = dict(state["cpu_s"])
