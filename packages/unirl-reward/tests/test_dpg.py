"""DPG-Bench by hand-worked answers."""

import pytest

from unirl.reward.local.judges.dpg import DPGScorer, dpg_score
from unirl.reward.local.judges.judge import JudgeError
from unirl.types.errors import ConfigError, RewardError

QUESTIONS = [
    {"id": 1, "question": "Is there a cat?", "parents": []},
    {"id": 2, "question": "Is the cat asleep?", "parents": [1]},
    {"id": 3, "question": "Is there a box?", "parents": []},
]


class FixedJudge:
    """Answers with given probabilities in order."""

    has_probabilities = True

    def __init__(self, *found):
        self.found = list(found)
        self.texts: list[str] = []

    def modules(self):
        return []

    def answer_probabilities(self, questions, answers):
        assert set(answers) == {"yes"}
        self.texts += [each.text for each in questions]
        return [self.found.pop(0) for _ in questions]

    def replies(self, questions, max_tokens):
        raise AssertionError("it is asked for probabilities")


def test_a_question_counts_as_no_where_one_that_it_depends_on_is():
    parents = {1: [], 2: [1], 3: [2]}
    assert dpg_score({1: True, 2: True, 3: True}, parents) == 1.0
    assert dpg_score({1: False, 2: True, 3: True}, parents) == 0.0
    assert dpg_score({1: True, 2: False, 3: True}, parents) == pytest.approx(1 / 3)
    assert dpg_score({1: True, 2: True}, {1: [2], 2: []}) == 1.0


def test_a_score_is_the_share_of_answers_and_details_are_before_dependencies(make_request):
    request = make_request(2).replace(metadata=[{"questions": QUESTIONS}, {"questions": QUESTIONS[2:]}])
    judge = FixedJudge(0.4, 0.9, 0.6, 0.5)
    scorer = DPGScorer(judge=judge, keeps_details=True)
    assert scorer.score(request).rewards.tolist() == pytest.approx([1 / 3, 1.0])
    assert judge.texts[0] == "Is there a cat? Answer yes or no."
    details = scorer.take_details()
    assert [each["answers"] for each in details.values()] == [[False, True, True], [True]]
    assert scorer.take_details() == {}


def test_a_question_without_an_answer_fails_its_sample(make_request):
    request = make_request(1).replace(metadata=[{"questions": QUESTIONS[:1]}])
    with pytest.raises(RewardError, match="too busy"):
        DPGScorer(judge=FixedJudge(JudgeError("too busy"))).score(request)


@pytest.mark.parametrize(
    ("row", "text"),
    [(None, "has no questions"), ({"questions": [QUESTIONS[1]]}, r"questions that depend on \[1\], which it has not")],
)
def test_a_row_that_cannot_be_asked_is_named(make_request, row, text):
    with pytest.raises(ConfigError, match=text):
        DPGScorer(judge=FixedJudge()).score(make_request(1).replace(metadata=[row]))
