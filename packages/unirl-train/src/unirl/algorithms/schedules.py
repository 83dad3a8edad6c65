"""Numbers that change over a run: clip ranges, and the decay of an old policy. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unirl.types.bounds import NonNegative, NonNegativeInt, UnitInterval, bounded

ClipSchedule = Literal["constant", "linear_decay", "cosine_decay"]


def clip_factor(schedule: ClipSchedule, progress: float) -> float:
    """Multiplier of a clip range at `progress` in [0, 1]: 1, 1 - p/2, or (1 + cos(pi p)) / 2."""
    if schedule == "linear_decay":
        return 1.0 - 0.5 * progress
    if schedule == "cosine_decay":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


@dataclass(frozen=True)
class LinearWeight:
    """A weight that goes from `start` at the first rollout of the run to `end` at the last."""

    start: float
    end: float

    def __call__(self, progress: float) -> float:
        """start + progress (end - start), progress in [0, 1]."""
        return self.start + progress * (self.end - self.start)


@bounded("decay")
@dataclass(frozen=True)
class OldPolicyDecay:
    """Decay d(t) of the sampling policy: 0 for t < flat, then min(start + rate (t - flat), cap).

    t counts rollouts. d = 0 samples from the newest policy. The three types of the reference implementation of
    DiffusionNFT are (flat, rate, cap) = (0, 0, 0), (0, .001, .5) and (75, .0075, .999).
    """

    start: UnitInterval = 0.0
    rate: NonNegative = 0.001
    cap: UnitInterval = 0.5
    flat: NonNegativeInt = 0

    def __call__(self, t: int) -> float:
        """d(t)."""
        if t < self.flat:
            return 0.0
        return min(self.start + self.rate * (t - self.flat), self.cap)
