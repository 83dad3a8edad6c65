"""The verifier of the moves world as a scorer."""

from __future__ import annotations

from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.catalog import CATALOG
from unirl.reward.local.video.frames import frames_of
from unirl.types.bounds import PositiveInt
from unirl.types.reward import RewardRequest


class MovesRewardScorer(LocalScorer):
    """Whether videos show the moving objects of their prompts: `strict_weight` * strict + `soft_weight` * soft.

    Components: strict (0 or 1) and soft (in [0, 1], 1 exactly when strict is). Needs the extra `shapes`.
    Runs on the CPU whatever the device of the videos.
    """

    card = CATALOG["moves"]

    def __init__(
        self,
        *,
        strict_weight: float = 1.0,
        soft_weight: float = 1.0,
        name: str = "moves",
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
            from unirl.reward.worlds.moves import score_moves
        except ModuleNotFoundError as error:
            raise ImportError(
                f"the moves scorer needs {error.name}. Install it with: pip install 'unirl-reward[shapes]'"
            ) from error
        strict_b, soft_b = score_moves(frames_of(request), request.prompts)
        return {"strict": strict_b, "soft": soft_b}
