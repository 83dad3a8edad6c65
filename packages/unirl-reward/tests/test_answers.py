"""Reading answers and ratings, by hand-worked cases."""

import pytest

from unirl.reward.local.judges.answers import rating, surface_forms, written_probability
from unirl.reward.local.judges.judge import JudgeError, Reply, Step


@pytest.mark.parametrize(
    ("answer", "forms"),
    [
        ("Yes", ["Yes", "yes", " Yes", " yes"]),
        ("no", ["No", "no", " No", " no"]),
        ("seven", ["seven", "Seven", " seven", "7"]),
        ("7", ["seven", "Seven", " seven", "7"]),
        ("red", ["red", "Red", " red"]),
    ],
)
def test_the_ways_to_write_an_answer(answer, forms):
    assert surface_forms(answer) == forms


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("Yes.", "yes", 1.0),
        (" no, there is none", "Yes", 0.0),
        ("Seven birds", "seven", 1.0),
        ("7", "seven", 1.0),
        ("12", "seven", 0.0),
        ("Blue", "red", 0.0),
        ("red!", "Red", 1.0),
    ],
)
def test_a_written_answer_is_one_or_zero(text, answer, value):
    assert written_probability(text, answer) == value


@pytest.mark.parametrize(("text", "answer"), [("Perhaps", "yes"), ("", "yes"), ("many", "seven"), ("...", "red")])
def test_a_text_that_is_no_answer_is_an_error_and_no_zero(text, answer):
    with pytest.raises(JudgeError, match="is no answer of the kind of"):
        written_probability(text, answer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Style Score (1-5): 3.62", 3.62),
        ("**Style Score**: 4", 4.0),
        ("style score - 2\nOther Score: 5", 2.0),
        ("Style Score (1 - 5) = 5/5", 5.0),
        ("Style Score: 3.", 3.0),
        ("Style Score: 3 and again Style Score: 3.0", 3.0),
    ],
)
def test_a_rating_is_the_number_after_its_label(text, value):
    assert rating(Reply(text), "Style Score", 1, 5, is_expected=False) == value


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("no idea", "gives no rating"),
        ("Style Score (1-5): unknown", "gives no rating"),
        ("Style Score:\n4", "gives no rating"),
        ("Style Score: -2", "gives no rating"),
        ("Style Score: 1-5", "gives no rating"),
        ("Style Score: 2\nStyle Score: 4", r"gives the ratings \[2.0, 4.0\]"),
        ("Style Score: 7", "rates Style Score 7, which is not from 1 to 5"),
    ],
)
def test_a_text_without_one_clear_rating_is_an_error(text, what):
    with pytest.raises(JudgeError, match=what):
        rating(Reply(text), "Style Score", 1, 5, is_expected=False)


def test_an_expected_rating_is_the_mean_under_the_probabilities_at_its_token():
    steps = (
        Step("Realism", {"Realism": 1.0}),
        Step(": ", {": ": 1.0}),
        Step("1", {"1": 0.5, "2": 0.25, " 2": 0.05, "0": 0.1, "9": 0.05, "one": 0.05}),
        Step("\n", {"\n": 1.0}),
    )
    reply = Reply("Realism: 1\n", steps)
    assert rating(reply, "Realism", 0, 2, is_expected=True) == pytest.approx((0.5 + 2 * 0.3) / 0.9)
    assert rating(reply, "Realism", 0, 2, is_expected=False) == 1.0


def test_an_expected_rating_without_probabilities_at_its_token_is_an_error():
    for reply in (Reply("Realism: 1"), Reply("Realism: 1", (Step("Other: 1 ", {"1": 1.0}),))):
        with pytest.raises(JudgeError, match="no probabilities of the ratings 0 to 2 at its rating of Realism"):
            rating(reply, "Realism", 0, 2, is_expected=True)
