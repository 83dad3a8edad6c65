"""The verifier of the edits world as a scorer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.reward.card import ScorerCard
from unirl.reward.worlds.verifier import VerifierScorer
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest


class EditsRewardScorer(VerifierScorer):
    """Verifies that images are edited as their instructions ask. See `VerifierScorer`.

    Needs one image per data row, of the size that is made.
    """

    prompt_grammar = "unirl.reward.worlds.edits_grammar.parse_edit"
    card = ScorerCard(
        name="edits",
        summary="was an instruction of the edits world carried out on the image given, and all else left as it was",
        media=("image",),
        needs="prompt, input image",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the edits world of this project",
    )

    # Any: the keywords of VerifierScorer.
    def __init__(self, *, name: str = "edits", **options: Any) -> None:
        super().__init__(name=name, **options)

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ConfigError unless every sample has one input image of the size made,
        ValueError for an instruction outside the grammar."""
        with self.from_extra():
            from unirl.reward.worlds.edits import score_edits
        size = tuple(request.pixels.shape[1:])
        found = sorted({tuple(tuple(image.shape) for image in sample) for sample in request.sources})
        if found != [(size,)]:
            raise ConfigError(f"scorer {self.name} needs one input image {size} a sample, as made; got {found}")
        sources = torch.stack([sample[0].cpu() for sample in request.sources])
        strict_b, soft_b = score_edits(request.pixels, sources, request.prompts)
        return {"strict": strict_b, "soft": soft_b}
