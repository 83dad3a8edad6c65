"""Scores that come with the data: preference labels of given images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.preference import given_score
from unirl.types.protocols.rewards import Scorer
from unirl.types.reward import RewardRequest


class LabelScorer(LocalScorer):
    """The score that a sample's row gives to its image, see `unirl.types.preference`.

    otherwise: scores samples whose rows bring no scores, which are those that the policy sampled for an evaluation.
    Without it they raise ConfigError. The two are never mixed in one mean: training rows bring scores, evaluation
    rows do not.
    """

    card = ScorerCard(
        name="labels",
        summary="the score that the data file gives to the sample",
        media=("image", "video", "text"),
        needs="metadata scores",
        typical="as the data gives",
        source="the data file",
    )

    def __init__(self, *, otherwise: Scorer | None = None, name: str = "labels", batch_size: PositiveInt = 64) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self._otherwise = otherwise

    def score_batch(self, request: RewardRequest) -> Tensor:
        """[b] float32."""
        scores = [given_score(row, sample) for row, sample in zip(request.metadata, request.sample_ids, strict=True)]
        values = torch.tensor([torch.nan if score is None else float(score) for score in scores])
        unlabelled = [row for row, score in enumerate(scores) if score is None]
        if unlabelled and self._otherwise is None:
            raise ConfigError(
                f"scorer {self.name}: the row of sample {request.sample_ids[unlabelled[0]]} has no scores. Give the "
                "scorer `otherwise`, a scorer for what the policy samples."
            )
        if unlabelled and self._otherwise is not None:
            values[unlabelled] = self._otherwise.score(request.select(unlabelled)).rewards.float().cpu()
        return values

    def modules(self) -> list[nn.Module]:
        """Those of `otherwise`."""
        return self._otherwise.modules() if isinstance(self._otherwise, LocalScorer) else []

    def move_to(self, device: str) -> None:
        """Move `otherwise`."""
        if isinstance(self._otherwise, LocalScorer):
            self._otherwise.move_to(device)

    def offload(self) -> None:
        """Offload `otherwise` too."""
        if isinstance(self._otherwise, LocalScorer):
            self._otherwise.offload()
        self.is_offloaded = True

    def onload(self) -> None:
        """Bring `otherwise` back too."""
        if isinstance(self._otherwise, LocalScorer):
            self._otherwise.onload()
        self.is_offloaded = False
