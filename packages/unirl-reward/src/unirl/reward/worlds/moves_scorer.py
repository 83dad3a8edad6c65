"""The verifier of the moves world as a scorer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.reward.card import ScorerCard
from unirl.reward.local.video.frames import frames_of
from unirl.reward.worlds.verifier import VerifierScorer
from unirl.types.reward import RewardRequest


class MovesRewardScorer(VerifierScorer):
    """Verifies that videos show the moving objects of their prompts. See `VerifierScorer`."""

    prompt_grammar = "unirl.reward.worlds.moves_grammar.parse_prompt"
    card = ScorerCard(
        name="moves",
        summary="does the video show what a prompt of the moves world asks for: objects, colours, steady motion",
        media=("video",),
        needs="prompt",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the moves world of this project",
    )

    # Any: the keywords of VerifierScorer.
    def __init__(self, *, name: str = "moves", **options: Any) -> None:
        super().__init__(name=name, **options)

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ValueError for a prompt outside the grammar."""
        with self.from_extra():
            from unirl.reward.worlds.moves import score_moves
        strict_b, soft_b = score_moves(frames_of(request), request.prompts)
        return {"strict": strict_b, "soft": soft_b}
