"""EditReward's two questions about an edited image, put to a judge."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.reward.card import ScorerCard
from unirl.reward.local.judges.judge import Judge, Question, pictures_of, sources_of
from unirl.reward.local.judges.rated import RatedScorer, Ratings, Scale
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.reward import RewardRequest

_QUESTION = """The first picture is the original, the second one an edit of it after this instruction:
{prompt}

Rate the edit on two scales from 1 (very bad) to 4 (very good).
Instruction Following: is all of the instruction carried out, rightly, and everything else left as it was? A second \
picture that looks like the first one has not followed the instruction.
Visual Quality: is the second picture plausible and clean, without artefacts, seams or wrong light?

Reply with two lines and nothing else:
Instruction Following: <rating>
Visual Quality: <rating>"""


@bounded("scorer")
class EditRewardScorer(RatedScorer):
    """Weighted sum of the ratings edit_following and edit_quality, each 1 to 4; by default their mean.

    judge: `APIJudge` or `VLMJudge` that sees two images: the source (the request's input image), then the edit.
    component_weights: of the two ratings; None: a half each. ratings: see RatedScorer.
    The two dimensions and the scale of 1 to 4 are EditReward's; its published model is a
    Qwen2.5-VL with a reward head. Here any judge answers, and the wording is this project's.
    Raises ConfigError for a request without input images, and as RatedScorer.
    Source: EditReward (arXiv 2509.26346).
    """

    card = ScorerCard(
        name="edit_reward",
        summary="instruction following and quality of an edit, rated by a judge",
        media=("image",),
        needs="prompt, input image, judge",
        low=1,
        high=4,
        extra="judge",
        source="dimensions of EditReward, arXiv 2509.26346",
    )
    scale = Scale({"edit_following": "Instruction Following", "edit_quality": "Visual Quality"}, 1, 4)

    def __init__(
        self,
        *,
        judge: Judge,
        component_weights: Mapping[str, float] | None = None,
        ratings: Ratings = "written",
        max_tokens: PositiveInt = 64,
        device: str = "cpu",
        name: str = "edit_reward",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            judge=judge,
            ratings=ratings,
            max_tokens=max_tokens,
            component_weights=dict.fromkeys(self.scale.labels, 0.5) if component_weights is None else component_weights,
            device=device,
            name=name,
            batch_size=batch_size,
        )

    def questions(self, request: RewardRequest) -> list[Question]:
        """The question about each pair of images."""
        sources = sources_of(request, self.name)
        edits = pictures_of(request, num_frames=1)
        return [
            Question(_QUESTION.format(prompt=prompt), (source, *edit))
            for prompt, source, edit in zip(request.prompts, sources, edits, strict=True)
        ]
