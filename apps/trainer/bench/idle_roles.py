"""Roles of a run that do nothing, for measurements of the loops around them."""

# ruff: noqa: INP001 - next to scripts, no package
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.types.roles import Collect, Dispatch, distributed


class IdleStack:
    """What a run asks of its stack but `train`, for texts of one policy."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Nothing to prepare."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def trained_tracks(self) -> list[str]:
        """The only one."""
        return ["text"]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def rollout_policy(self) -> None:
        """The policy that trains."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def old_logp(self) -> None:
        """None are needed."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def state_dict(self) -> dict[str, float]:
        """There is none."""
        return {}


class NoCheckpoints:
    """Keeps nothing."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def remove_unfinished(self) -> None:
        """There are none."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def save(
        self, step: int, driver_state: dict[str, Any], score: float | None = None, kept: Sequence[str] = ()
    ) -> None:
        """Forget it."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait(self) -> None:
        """Nothing to wait for."""
