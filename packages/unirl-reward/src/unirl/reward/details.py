"""Scorers that know more of a sample than its scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.reward.base import LocalScorer
from unirl.types.bounds import PositiveInt


class DetailedScorer(LocalScorer):
    """Keeps what it finds in each sample until that is taken, if `keeps_details`. Other arguments: of LocalScorer."""

    def __init__(
        self,
        *,
        keeps_details: bool,
        name: str,
        batch_size: PositiveInt = 8,
        device: str = "cpu",
        component_weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device, component_weights=component_weights)
        self._keeps_details = keeps_details
        self._details: dict[str, dict[str, Any]] = {}  # Any: JSON values

    def take_details(self) -> dict[str, dict[str, Any]]:  # Any: JSON values
        """By sample since the last call, with `keeps_details`; the class says what."""
        taken, self._details = self._details, {}
        return taken
