"""The verifier of the shapes world as a scorer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.reward.card import ScorerCard
from unirl.reward.worlds.verifier import VerifierScorer
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest


class ShapesRewardScorer(VerifierScorer):
    """Verifies that images show what their prompts ask for. See `VerifierScorer`.

    meaning: field of the metadata with a prompt of the world that says what a user's prompt means; None: the prompt
        itself is one.
    """

    prompt_grammar = "unirl.reward.worlds.shapes_grammar.parse_prompt"
    card = ScorerCard(
        name="shapes",
        summary="does the image show what a prompt of the shapes world asks for",
        media=("image",),
        needs="prompt",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the shapes world of this project",
    )

    # Any: the keywords of VerifierScorer.
    def __init__(self, *, name: str = "shapes", meaning: str | None = None, **options: Any) -> None:
        super().__init__(name=name, **options)
        self._meaning = meaning

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict and soft, float32 [b]. Raises ValueError for a prompt outside the grammar, ConfigError if a row
        has no meaning."""
        with self.from_extra():
            from unirl.reward.worlds.shapes import score_shapes
        strict_b, soft_b = score_shapes(request.pixels, self._asked(request))
        return {"strict": strict_b, "soft": soft_b}

    def _asked(self, request: RewardRequest) -> list[str]:
        if self._meaning is None:
            return request.prompts
        meanings: list[str] = []
        for prompt, row in zip(request.prompts, request.metadata, strict=True):
            meaning = (row or {}).get(self._meaning)
            if not isinstance(meaning, str):
                raise ConfigError(
                    f"scorer {self.name} reads metadata.{self._meaning}, and the row of {prompt!r} has {meaning!r} "
                    "there. Add it to the data, or set meaning: null."
                )
            meanings.append(meaning)
        return meanings
