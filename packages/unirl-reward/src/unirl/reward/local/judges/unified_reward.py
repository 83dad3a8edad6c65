"""UnifiedReward: alignment, coherence and style of an image, rated by a vision-language model trained to."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.judges.judge import Judge, Question, pictures_of
from unirl.reward.local.judges.rated import RatedScorer, Ratings, Scale
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

_QUESTION = """Judge the generated image against its caption.

First give each word of the caption a score for how badly the image shows it, higher being worse, and one for \
[No_mistakes], higher meaning that nothing is wrong. Then rate the image from 1 to 5 for:
Alignment - does its content match the caption?
Coherence - is it free of glitches, broken objects and contradictions?
Style - is it pleasing to look at, whatever the caption asks for?

Write exactly this:
Word-wise Scores: [["word1", score1], ..., ["[No_mistakes]", scoreM]]

Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z

Text Caption: [{prompt}]"""


@bounded("scorer")
class UnifiedRewardScorer(RatedScorer):
    """Weighted sum of the ratings alignment, coherence and style, each 1 to 5; by default their mean.

    judge: `APIJudge` on a server of UnifiedReward (CodeGoat24/UnifiedReward-qwen-7b or 2.0), or `VLMJudge` with its
    weights. component_weights: of the three ratings; None: a third each.
    normalise: the reward / 5, for weights that sum to 1.
    ratings: "written", the decimals that the model writes; "expected" is for other judges, which write whole ratings.
    instruction: the question, with {prompt} where the caption goes. The default asks for the published format in this
    project's own words; give the published wording (point_score_ACS_image_generation.py of CodeGoat24/UnifiedReward)
    for numbers as the model was trained.
    Source: UnifiedReward (arXiv 2503.05236).
    """

    card = ScorerCard(
        name="unified_reward",
        summary="alignment, coherence and style, rated by a judge trained to",
        media=("image",),
        needs="prompt, judge",
        low=1,
        high=5,
        normalisation=Normalisation(5),
        extra="judge",
        source="UnifiedReward, arXiv 2503.05236",
    )
    scale = Scale({"alignment": "Alignment Score", "coherence": "Coherence Score", "style": "Style Score"}, 1, 5)

    def __init__(
        self,
        *,
        judge: Judge,
        component_weights: Mapping[str, float] | None = None,
        normalise: bool = False,
        ratings: Ratings = "written",
        instruction: str = _QUESTION,
        max_tokens: PositiveInt = 1024,
        device: str = "cpu",
        name: str = "unified_reward",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            judge=judge,
            ratings=ratings,
            max_tokens=max_tokens,
            component_weights=dict.fromkeys(self.scale.labels, 1 / 3)
            if component_weights is None
            else component_weights,
            device=device,
            name=name,
            batch_size=batch_size,
            normalise=normalise,
        )
        if "{prompt}" not in instruction:
            raise ConfigError(
                f"scorer {name}: its instruction has no {{prompt}}, so the judge would not see the caption"
            )
        self.instruction = instruction

    def questions(self, request: RewardRequest) -> list[Question]:
        """The question about each image."""
        pictures = pictures_of(request, num_frames=1)
        return [
            Question(self.instruction.replace("{prompt}", prompt), seen)
            for prompt, seen in zip(request.prompts, pictures, strict=True)
        ]
