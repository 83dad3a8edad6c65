"""WISE: is an image right where the prompt asks for knowledge of the world, by ratings of a judge."""

from __future__ import annotations

from typing import Any

from unirl.reward.card import ScorerCard
from unirl.reward.local.judges.judge import Judge, Question, pictures_of
from unirl.reward.local.judges.rated import RatedScorer, Ratings, Scale
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

CONSISTENCY, REALISM, AESTHETIC = 0.7, 0.2, 0.1
"""Shares of the three ratings in WiScore."""

_QUESTION = """You check pictures that a model made from a prompt. Be strict: when in doubt, give the lower rating.

Prompt: {prompt}
What the prompt means: {explanation}

Rate three things, each 0, 1 or 2.
Consistency: does the picture show what the prompt means? 0 - it misses or contradicts what matters most; \
1 - it shows a part of it, or not quite rightly; 2 - it shows all of it, and nothing against it.
Realism: could it be a photograph? 0 - it is plainly artificial or breaks the laws of physics; 1 - it has small flaws; \
2 - light, matter, proportions and space are all as in the world.
Aesthetic Quality: does it please? 0 - composition and colours do not work; 1 - it is decent but plain; \
2 - it is of the quality of an excellent work.

Reply with three lines and nothing else:
Consistency: <rating>
Realism: <rating>
Aesthetic Quality: <rating>"""


@bounded("scorer")
class WISEScorer(RatedScorer):
    """WiScore = (0.7 consistency + 0.2 realism + 0.1 aesthetic) / 2, 0 to 1; the components are the ratings, 0 to 2.

    judge: `APIJudge` or `VLMJudge`; published with GPT-4o.
    ratings: "written" as published; "expected" is finer, see RatedScorer.
    Metadata of every sample: "explanation" (or "Explanation", as WISE's files have it), what the prompt means. The
    wording of the question is this project's own, so numbers are comparable with one another, not to the digit with
    the published ones.
    Raises ConfigError for a sample without an explanation, and as RatedScorer.
    Source: WISE (arXiv 2503.07265).
    """

    card = ScorerCard(
        name="wise",
        summary="is a prompt that takes knowledge of the world understood (WiScore), rated by a judge",
        media=("image",),
        needs="prompt, metadata explanation, judge",
        low=0,
        high=1,
        extra="judge",
        source="WISE, arXiv 2503.07265",
    )
    scale = Scale({"consistency": "Consistency", "realism": "Realism", "aesthetic": "Aesthetic Quality"}, 0, 2)

    def __init__(
        self,
        *,
        judge: Judge,
        ratings: Ratings = "written",
        max_tokens: PositiveInt = 64,
        device: str = "cpu",
        name: str = "wise",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            judge=judge,
            ratings=ratings,
            max_tokens=max_tokens,
            component_weights={"consistency": CONSISTENCY / 2, "realism": REALISM / 2, "aesthetic": AESTHETIC / 2},
            device=device,
            name=name,
            batch_size=batch_size,
        )

    def questions(self, request: RewardRequest) -> list[Question]:
        """The question about each image."""
        pictures = pictures_of(request, num_frames=1)
        metadata = request.metadata or [None] * len(pictures)
        return [
            Question(_QUESTION.format(prompt=prompt, explanation=self._explanation(sample, row)), seen)
            for sample, prompt, row, seen in zip(request.sample_ids, request.prompts, metadata, pictures, strict=True)
        ]

    def _explanation(self, sample: str, row: dict[str, Any] | None) -> str:  # Any: a row of a user's data file
        found = (row or {}).get("explanation") or (row or {}).get("Explanation")
        if not isinstance(found, str):
            raise ConfigError(
                f"scorer {self.name}: sample {sample} has no explanation of its prompt. Give its data row one."
            )
        return found
