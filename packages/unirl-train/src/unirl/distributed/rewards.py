"""Reward services of several groups of workers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.distributed.held import Held

Service = Any
"""The role of a RewardService, whose methods follow its markers."""


class LedRewards:
    """Leads a response from group to group, each of which has some of the scorers; the last one composes the reward.

    parts: those that score in part. last: the one that knows the weights of all.
    """

    def __init__(self, parts: Sequence[Service], last: Service) -> None:
        self._parts = list(parts)
        self._last = last

    def score_track(self, resp: Held, track: str, *, is_training: bool = True) -> list[dict[str, float]]:
        """Write the rewards of a track into it; how scoring kept up, per shard of the last group."""
        for part in self._parts:
            part.score_part(resp, track, is_training=is_training)
        return self._last.score_track(resp, track, is_training=is_training)

    def offload(self) -> None:
        """Move the models of all groups to host memory."""
        for service in (*self._parts, self._last):
            service.offload()

    def onload(self) -> None:
        """Move them back."""
        for service in (*self._parts, self._last):
            service.onload()
