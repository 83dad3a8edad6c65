"""Comparisons by a judge: what it is asked, and what its answers are worth."""

import itertools

import numpy as np
import pytest
import torch

from unirl.reward.local.judges.judge import JudgeError, Question, Reply
from unirl.reward.local.judges.pairwise_judge import PairwiseJudgeScorer
from unirl.reward.local.judges.vlm_judge import VLMJudge
from unirl.types.errors import ConfigError

from .test_geneval2 import RecordedJudge
from .test_groupwise import GROUPS, request_of
from .vlm_folders import write_qwen_vl


class Bright(RecordedJudge):
    """Prefers the brighter image, and the first one by `bias`."""

    def __init__(self, bias=0.0):
        super().__init__([])
        self.bias = bias

    def verdict(self, question: Question) -> float:
        first, second = (np.asarray(picture).mean() for picture in question.pictures)
        return min(1.0, (0.75 if first > second else 0.25) + self.bias)

    def answer_probabilities(self, questions, answers):
        self.questions += questions
        self.answers += answers
        return [self.verdict(question) for question in questions]

    def replies(self, questions, max_tokens):
        self.questions += questions
        better = ["1" if self.verdict(question) > 0.5 else "2" for question in questions]
        return [Reply(f"Image 1 is better at first sight, but in the end Image {each} is better.") for each in better]


@pytest.mark.parametrize(("verdict", "high"), [("probability", 0.75), ("written", 1.0)])
@pytest.mark.parametrize("both_orders", [False, True])
def test_the_win_rate_is_the_mean_of_the_verdicts(verdict, high, both_orders):
    judge = Bright()
    found = PairwiseJudgeScorer(judge=judge, verdict=verdict, both_orders=both_orders).score(request_of(GROUPS))
    assert found.rewards.tolist() == pytest.approx([1 - high, 0.5, high] * 3)
    assert len(judge.questions) == 9 * (1 + both_orders)
    assert all(len(question.pictures) == 2 for question in judge.questions)
    assert "Caption: b\n" in judge.questions[4].text
    assert set(judge.answers) == ({"Yes"} if verdict == "probability" else set())


def test_asking_in_both_orders_takes_a_favoured_place_out():
    request = request_of(["a"] * 4)
    fair = PairwiseJudgeScorer(judge=Bright(), both_orders=True).score(request).rewards
    assert torch.allclose(PairwiseJudgeScorer(judge=Bright(0.2), both_orders=True).score(request).rewards, fair)
    # Three comparisons each cannot come first as often as second; two can, so that the favour falls out of the mean.
    assert not torch.allclose(PairwiseJudgeScorer(judge=Bright(0.2)).score(request).rewards, fair)
    ring = [PairwiseJudgeScorer(judge=Bright(bias), opponents=2).score(request).rewards for bias in (0.0, 0.2)]
    assert torch.allclose(ring[0], ring[1])


def test_a_reply_without_a_verdict_fails_the_group_or_is_left_out():
    replies = ["Image 1 is better", "I cannot choose.", JudgeError("busy"), "<answer>image 2 is better</answer>"] + [
        "Image 2 is better"
    ] * 2
    request = request_of(["a"] * 4)
    found = PairwiseJudgeScorer(judge=RecordedJudge(replies), verdict="written").score_isolated(request, "sample")
    assert found.successes == [False] * 4
    assert str(found.errors[0]).startswith(
        "2 of the 6 comparisons of its group have no answer: the reply that ends with"
    )
    scorer = PairwiseJudgeScorer(judge=RecordedJudge(replies), verdict="written", max_failed=0.5)
    # Asked are (0, 1), (2, 0) and (1, 2), which have no verdict, (0, 3), (3, 1) and (2, 3).
    assert scorer.score(request).rewards.tolist() == pytest.approx([0.5, 0.5, 0.0, 2 / 3])


def test_a_model_in_this_process_judges(tmp_path):
    judge = VLMJudge(model=write_qwen_vl(tmp_path, "qwen2_5_vl"), dtype="fp32")
    scorer = PairwiseJudgeScorer(judge=judge)
    request = request_of(["a"] * 3)
    request = request.replace(generated={"image": request.generated["image"].replace(pixels=torch.rand(3, 3, 56, 56))})
    found = scorer.score(request).rewards
    assert found.isfinite().all()
    assert float(found.mean()) == pytest.approx(0.5, abs=1e-6)
    pictures = scorer.preferences(request, list(itertools.permutations(range(3), 2)))
    assert all(0 <= float(win) <= 1 for win in pictures if not isinstance(win, Exception))
    assert scorer.modules() == judge.modules()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verdict": "loud"}, "verdict = 'loud' must be one of probability, written"),
        ({"instruction": "Which one?"}, "its instruction has no {prompt}"),
        ({"pattern": "Image [12]"}, "must have one group, the number of the better image"),
        ({"pattern": "Image ("}, "is no regular expression"),
    ],
)
def test_mistakes_have_messages(options, message):
    with pytest.raises(ConfigError, match=message):
        PairwiseJudgeScorer(judge=Bright(), **options)
