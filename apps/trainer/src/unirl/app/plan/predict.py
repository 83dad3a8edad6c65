"""Seconds of a step from what a rehearsal counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unirl.app.plan.rates import Clock
from unirl.app.rehearsal.rehearse import Rehearsed
from unirl.rehearsal.operators import Call, total_flops

TRAIN = "train"
STEP = ("rollout", "reward", TRAIN, "push")
"""The phases of a step, in their order."""
MAKING = ("rollout", "reward")
"""Those that make what is trained on."""


@dataclass(frozen=True)
class Seconds:
    """What one phase of a step takes of one device."""

    device_s: float
    host_s: float
    """Time to start its calls."""
    sent_s: float
    """Time of its collectives."""
    flops: float
    is_asynchronous: bool

    @property
    def wall_s(self) -> float:
        """Where the host goes on while the device computes and sends, the longest of the three."""
        if self.is_asynchronous:
            return max(self.device_s, self.host_s, self.sent_s)
        return self.device_s + self.host_s + self.sent_s

    def times(self, scale: float) -> Seconds:
        """So many times as long."""
        return replace(
            self,
            device_s=scale * self.device_s,
            host_s=scale * self.host_s,
            sent_s=scale * self.sent_s,
            flops=scale * self.flops,
        )

    @property
    def bound(self) -> str:
        """What it waits for."""
        parts = {"device": self.device_s, "host": self.host_s, "links": self.sent_s}
        return max(parts, key=lambda name: parts[name])


def predicted(found: Rehearsed, clock: Clock) -> dict[str, Seconds]:
    """Seconds of every phase that computes or sends."""
    phases = [*STEP, *(phase for phase in found.operators if phase not in STEP)]
    every = {phase: _phase(found, phase, clock) for phase in phases}
    return {phase: seconds for phase, seconds in every.items() if seconds.wall_s > 0}


def _phase(found: Rehearsed, phase: str, clock: Clock) -> Seconds:
    calls: Mapping[Call, float] = found.operators.get(phase, {})
    num_bytes = found.times.get(phase, 1.0) * sum(found.collectives.get(phase, {}).values())
    return Seconds(
        device_s=sum(times * clock.seconds(call, trains=phase == TRAIN) for call, times in calls.items()),
        host_s=clock.host_s * sum(times for call, times in calls.items() if clock.is_started(call)),
        sent_s=clock.sent_s(num_bytes, found.num_ranks),
        flops=total_flops(calls),
        is_asynchronous=clock.is_asynchronous,
    )
