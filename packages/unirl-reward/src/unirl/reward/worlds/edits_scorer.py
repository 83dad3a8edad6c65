"""The verifier of the edits world as a scorer."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.catalog import CATALOG
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest


class EditsRewardScorer(LocalScorer):
    """Whether pictures are edits as their instructions ask: `strict_weight` * strict + `soft_weight` * soft.

    Components: strict (0 or 1) and soft (in [0, 1], 1 exactly when strict is). Needs the extra `shapes`, and one image
    a data row, of the size that is made. Runs on the CPU whatever the device of the pictures.
    """

    card = CATALOG["edits"]

    def __init__(
        self,
        *,
        strict_weight: float = 1.0,
        soft_weight: float = 1.0,
        name: str = "edits",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(
            name=name,
            batch_size=batch_size,
            component_weights={"strict": strict_weight, "soft": soft_weight},
        )

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ConfigError unless every sample has one input image of the size made,
        ValueError for an instruction outside the grammar."""
        try:
            from unirl.reward.worlds.edits import score_edits
        except ModuleNotFoundError as error:
            raise ImportError(
                f"the edits scorer needs {error.name}. Install it with: pip install 'unirl-reward[shapes]'"
            ) from error
        size = tuple(request.pixels.shape[1:])
        found = sorted({tuple(tuple(image.shape) for image in sample) for sample in request.sources})
        if found != [(size,)]:
            raise ConfigError(f"scorer {self.name} needs one input image {size} a sample, as made; got {found}")
        sources = torch.stack([sample[0].cpu() for sample in request.sources])
        strict_b, soft_b = score_edits(request.pixels, sources, request.prompts)
        return {"strict": strict_b, "soft": soft_b}
