"""What the asynchronous loop measures of a rollout."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from unirl.distributed.busy_clock import BusyClock
from unirl.trainer.guardrails import PARTS, WALL_S
from unirl.trainer.loops.slots import Slot, Slots
from unirl.types.rollout import RolloutResp


class LoopGauges:
    """Who works and who waits, since the last rollout."""

    def __init__(self) -> None:
        self.busy: Mapping[str, BusyClock] = {name: BusyClock() for name in PARTS}
        """Entered while a part works."""
        self.push_wait_s = 0.0
        """Seconds in which training waited for the end of requests or calls."""
        self._measured_at = time.monotonic()

    def start(self) -> None:
        """The run begins now."""
        self._measured_at = time.monotonic()

    def take(self, slots: Slots[Any], taken: Collection[Slot[Any]], num_samples: int) -> dict[str, float]:
        """How old the samples of a rollout are, which requests it was made of, and who waited since the last one."""
        lags = [slots.version - own for slot in taken for own in slot.versions]
        begun, self._measured_at = self._measured_at, time.monotonic()
        wall_s = self._measured_at - begun
        busy_s = {name: clock.take() for name, clock in self.busy.items()}
        held_s, self.push_wait_s = self.push_wait_s, 0.0
        return {
            "schedule/lag/newest": float(min(lags)),
            "schedule/lag/oldest": float(max(lags)),
            "schedule/push_wait_s": held_s,
            **{f"schedule/{name}_idle_s": max(0.0, wall_s - seconds) for name, seconds in busy_s.items()},
            WALL_S: wall_s,
            "schedule/concurrency": sum(busy_s.values()) / wall_s,
            "perf/samples_per_s": num_samples / wall_s,
            **_waiting_metrics(slots, taken),
        }


def span_metrics(resp: RolloutResp) -> dict[str, float]:
    """How many samples several versions made, and over how many optimizer steps. resp: metadata."""
    spans = [
        track.last_versions - track.policy_versions
        for track in resp.tracks.values()
        if track.last_versions is not None and track.policy_versions is not None
    ]
    steps = torch.cat([torch.zeros(1, dtype=torch.long), *spans])
    return {"schedule/samples_resumed": float((steps > 0).sum()), "schedule/version_span/max": float(steps.max())}


def _waiting_metrics(slots: Slots[Any], taken: Collection[Slot[Any]]) -> dict[str, float]:
    """Finished requests that are not of the rollout that was taken, and older ones that are not finished."""
    waiting, overtaken = slots.num_waiting - len(taken), slots.num_overtaken
    own = {"schedule/requests_waiting": float(waiting), "schedule/requests_overtaken": float(overtaken)}
    return {**own, **slots.take_too_old()} if slots.window > 1 else own
