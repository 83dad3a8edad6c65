"""The verifier of the shapes world as a scorer."""

from __future__ import annotations

from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.catalog import CATALOG
from unirl.types.bounds import PositiveInt
from unirl.types.reward import RewardRequest


class ShapesRewardScorer(LocalScorer):
    """Whether images show what their prompts ask for: `strict_weight` * strict + `soft_weight` * soft.

    Components: strict (0 or 1) and soft (in [0, 1], 1 exactly when strict is). Needs the extra `shapes`.
    Runs on the CPU whatever the device of the pictures.
    """

    card = CATALOG["shapes"]

    def __init__(
        self,
        *,
        strict_weight: float = 1.0,
        soft_weight: float = 1.0,
        name: str = "shapes",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(
            name=name,
            batch_size=batch_size,
            component_weights={"strict": strict_weight, "soft": soft_weight},
        )

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ValueError for a prompt outside the grammar."""
        try:
            from unirl.reward.worlds.shapes import score_shapes
        except ModuleNotFoundError as error:
            raise ImportError(
                f"the shapes scorer needs {error.name}. Install it with: pip install 'unirl-reward[shapes]'"
            ) from error
        strict_b, soft_b = score_shapes(request.pixels, request.prompts)
        return {"strict": strict_b, "soft": soft_b}
