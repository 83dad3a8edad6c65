"""Pairwise comparisons by a vision-language model: which of two images shows the prompt better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from PIL import Image
from torch import nn

from unirl.reward.card import ScorerCard
from unirl.reward.comparisons import Pair, Ranking
from unirl.reward.local.judges.judge import Judge, JudgeError, Question, Reply, pictures_of
from unirl.reward.pairwise import PairwiseScorer
from unirl.types.bounds import PositiveInt, UnitInterval, bounded
from unirl.types.errors import ConfigError, RewardError
from unirl.types.reward import RewardRequest

Verdict = Literal["probability", "written"]

_CRITERIA = """You see two images that were generated from the same caption. Compare them: which one shows more \
completely what the caption says, has fewer broken or implausible parts, and is the better picture?

Caption: {prompt}

"""
_QUESTIONS: dict[Verdict, str] = {
    "probability": _CRITERIA + "Is the first image better than the second? Answer with Yes or No.",
    "written": _CRITERIA + "Think about both, then end with exactly one of: Image 1 is better. Image 2 is better.",
}
_PATTERN = r"Image ([12]) is better"
_MAX_SHOWN = 120


@bounded("scorer")
class PairwiseJudgeScorer(PairwiseScorer):
    """What an image wins when a judge compares it with other images of its prompt.

    judge: `APIJudge` or `VLMJudge`.
    verdict: "probability", the judge's probability of Yes to "is the first better?", one token per comparison;
    "written", the last verdict in a reply of at most `max_tokens` tokens, 0 or 1, for judges that think first.
    instruction: the question, with {prompt} where the caption goes; the default is this project's own wording.
    pattern: of a written verdict; its only group is the number of the better image, 1 or 2. The default is how
    UnifiedReward-Think (arXiv 2505.03318) concludes; give its wording as `instruction` for answers as it was trained.
    both_orders: ask about each pair in both orders and take the mean: twice the questions, and no place is favoured.
    opponents, ranking, max_failed, batch_size: see `PairwiseScorer`.
    Raises ConfigError for an impossible value. Source: Pref-GRPO (arXiv 2508.20751).
    """

    card = ScorerCard(
        name="pairwise_judge",
        summary="what an image wins when a judge compares it with others of its prompt",
        media=("image",),
        needs="prompt, judge, several samples per prompt",
        typical="win_rate: [0, 1], mean 1/2; bradley_terry: mean 0",
        extra="judge",
        source="Pref-GRPO, arXiv 2508.20751",
    )

    def __init__(
        self,
        *,
        judge: Judge,
        verdict: Verdict = "probability",
        instruction: str | None = None,
        pattern: str = _PATTERN,
        max_tokens: PositiveInt = 1024,
        both_orders: bool = False,
        opponents: PositiveInt | None = None,
        ranking: Ranking = "win_rate",
        max_failed: UnitInterval = 0.0,
        device: str = "cpu",
        name: str = "pairwise_judge",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(
            name=name,
            opponents=opponents,
            ranking=ranking,
            max_failed=max_failed,
            batch_size=batch_size,
            device=device,
        )
        if verdict not in _QUESTIONS:
            raise ConfigError(f"scorer {name}: verdict = {verdict!r} must be one of {', '.join(_QUESTIONS)}")
        self.instruction = _QUESTIONS[verdict] if instruction is None else instruction
        if "{prompt}" not in self.instruction:
            raise ConfigError(
                f"scorer {name}: its instruction has no {{prompt}}, so the judge would not see the caption"
            )
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"scorer {name}: pattern = {pattern!r} is no regular expression: {error}") from error
        if self._pattern.groups != 1:
            raise ConfigError(
                f"scorer {name}: pattern = {pattern!r} must have one group, the number of the better image"
            )
        self._judge = judge
        self.verdict: Verdict = verdict
        self.max_tokens = max_tokens
        self.both_orders = both_orders

    def modules(self) -> list[nn.Module]:
        """Those of the judge."""
        return self._judge.modules()

    def preferences(self, request: RewardRequest, pairs: Sequence[Pair]) -> list[float | RewardError]:
        """P(the first of each pair of rows is the better one), or why the judge gave no verdict."""
        pictures = [picture for (picture,) in pictures_of(request, num_frames=1)]
        wins = self._wins(request.prompts, pictures, pairs)
        if not self.both_orders:
            return wins
        losses = self._wins(request.prompts, pictures, [(second, first) for first, second in pairs])
        return [_mean(win, loss) for win, loss in zip(wins, losses, strict=True)]

    def _wins(
        self, prompts: Sequence[str], pictures: Sequence[Image.Image], pairs: Sequence[Pair]
    ) -> list[float | RewardError]:
        questions = [
            Question(self.instruction.replace("{prompt}", prompts[first]), (pictures[first], pictures[second]))
            for first, second in pairs
        ]
        if self.verdict == "probability":
            return list(self._judge.answer_probabilities(questions, ["Yes"] * len(questions)))
        return [self._read(reply) for reply in self._judge.replies(questions, self.max_tokens)]

    def _read(self, reply: Reply | JudgeError) -> float | RewardError:
        if isinstance(reply, JudgeError):
            return reply
        found = [match[1] for match in self._pattern.finditer(reply.text)]
        if not found or found[-1] not in ("1", "2"):
            shown = " ".join(reply.text.split())[-_MAX_SHOWN:]
            return JudgeError(f"the reply that ends with {shown!r} has no verdict")
        return float(found[-1] == "1")


def _mean(win: float | RewardError, loss: float | RewardError) -> float | RewardError:
    """The mean of both orders; what one of them lacks, the pair lacks."""
    if isinstance(win, RewardError):
        return win
    return loss if isinstance(loss, RewardError) else (win + 1 - loss) / 2
