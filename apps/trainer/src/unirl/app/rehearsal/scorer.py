"""A scorer of true size whose scores are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.sde.noise import keyed_uniform
from unirl.types.bounds import NonNegative, PositiveInt
from unirl.types.reward import RewardRequest


class DrawnScorer(LocalScorer):
    """Holds as much as the scorer that it stands for, and draws scores of spread 1 by the ids of samples.

    num_bytes: of its models. scorer: one that computes as it would, whose scores say nothing. With a gradient, a score
    is that of `scorer`; without one it depends on every pixel.
    """

    is_differentiable: ClassVar[bool] = True
    reads_media = False  # episodes of small policies have none

    def __init__(
        self,
        *,
        num_bytes: NonNegative = 0,
        scorer: LocalScorer | None = None,
        name: str = "drawn",
        batch_size: PositiveInt = 8,
        device: str = "cpu",
        component_weights: Mapping[str, float] | None = None,
    ) -> None:
        if scorer is not None:
            device, component_weights = scorer.device, scorer.component_weights
        super().__init__(name=name, batch_size=batch_size, device=device, component_weights=component_weights)
        self._scorer = scorer
        self._model = nn.Module()
        weights = torch.empty(int(num_bytes), dtype=torch.uint8, device=device)
        self._model.register_buffer("weights", weights)

    def modules(self) -> list[nn.Module]:
        """What stands for its models."""
        return [self._model, *([] if self._scorer is None else self._scorer.modules())]

    def score_batch(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor]:
        """Normal numbers [b]."""
        if self._scorer is not None:
            self._scorer.score_batch(request)
        drawn = keyed_uniform([f"{self.name}/{key}" for key in request.sample_ids], 0, ())
        return {key: drawn for key in self.component_weights} if self.component_weights else drawn

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor]:
        """The scores of the scorer, or the mean pixel of each sample [b]."""
        if self._scorer is not None:
            return self._scorer.score_batch_with_gradient(request)
        return request.pixels.flatten(1).float().mean(1)
