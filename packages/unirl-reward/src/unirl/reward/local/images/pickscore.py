"""PickScore: which image people would pick for a prompt."""

from __future__ import annotations

from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.types.bounds import PositiveInt


class PickScoreRewardScorer(CLIPRewardScorer):
    """exp(logit_scale) * cos(image, prompt) / 26 of a CLIP-H model tuned on people's choices.

    normalise: the division by 26 brings the model's logits, about 18 to 24, near 0.8, as Flow-GRPO (arXiv 2505.05470)
    does; without it the score is that of the paper. Other arguments as in CLIPRewardScorer.
    Source: Pick-a-Pic (arXiv 2305.01569).
    """

    model_billions = 0.986
    card = ScorerCard(
        name="pickscore",
        summary="which image people would pick for a prompt",
        media=("image",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 18 to 24",
        normalisation=Normalisation(26, is_default=True),
        extra="clip",
        source="Pick-a-Pic, arXiv 2305.01569",
    )

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        normalise: bool = True,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "pickscore",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            model=model,
            processor=processor,
            normalise=normalise,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
        )
