"""Rules on texts, on cases worked by hand."""

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.reward.local.texts.exact_match import ExactMatchScorer
from unirl.reward.local.texts.format import FormatScorer, has_sections
from unirl.reward.local.texts.gsm8k import GSM8KScorer, final_number
from unirl.reward.local.texts.multiple_choice import MultipleChoiceScorer, chosen_option
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest

QUICK = settings(max_examples=100, deadline=None)


def request_of(texts, answers, key="answer"):
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(texts))],
        generated={"text": Texts(texts=list(texts))},
        metadata=[{} if answer is None else {key: answer} for answer in answers],
    )


def reward(scorer, text, answer):
    return scorer.score(request_of([text], [answer])).rewards.item()


# Exact match


@pytest.mark.parametrize(
    ("keywords", "text", "answer", "expected"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"is_case_sensitive": False}, "PARIS", "Paris", 1),
        ({}, "It is Paris", "Paris", 0),
        ({}, "", "Paris", 0),
        ({}, "19", 19, 1),
        ({"pattern": r"<a>(.*?)</a>"}, "<a>1</a> no, <a> 2 </a>", "2", 1),
        ({"pattern": r"<a>(.*?)</a>"}, "<a>2</a> no, <a>1</a>", "2", 0),
        ({"pattern": r"<a>(.*?)</a>"}, "2", "2", 0),
        ({"pattern": r"=(?:\s*)(\d+)$"}, "12+7= 19", 19, 1),
    ],
)
def test_exact_match(keywords, text, answer, expected):
    assert reward(ExactMatchScorer(**keywords), text, answer) == expected


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "is no regular expression"), ("a", "has 0 groups"), ("(a)(b)", "has 2 groups")]
)
def test_a_pattern_that_finds_no_one_answer_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        ExactMatchScorer(pattern=pattern)


# Multiple choice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is B.", "B"),
        ("the answer is (c)", "C"),
        ("Answer: **D**", "D"),
        (r"The answer is $\boxed{A}$", "A"),
        (r"so the answer is \boxed{\text{B}}", "B"),
        ("The answer is 3", "C"),
        ("The answer is A. Wait, the answer is D.", "D"),
        ("A is wrong, B is wrong, so C", "C"),
        ("(B)", "B"),
        ("The answer is Berlin, which is option A", "A"),
        ("The answer is 12", None),
        ("BAD CAB", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_chosen_option_of_a_text(text, expected):
    assert chosen_option(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("B", 1), ("b", 1), ("(B)", 1), ("B.", 1), (2, 1), ("2", 1), ("C", 0), (3, 0)]
)
def test_the_reference_is_a_letter_or_a_digit(answer, expected):
    assert reward(MultipleChoiceScorer(), "the answer is B", answer) == expected


@pytest.mark.parametrize("answer", [0, 5, "E", "Berlin", "AB"])
def test_a_reference_that_is_no_option_raises(answer):
    with pytest.raises(ContractError, match=r"none of the options A, B, C, D \(or 1 to 4\). Count from 1"):
        reward(MultipleChoiceScorer(), "the answer is B", answer)


def test_more_options_are_read_where_there_are_more():
    assert reward(MultipleChoiceScorer(num_options=6), "the answer is F", "F") == 1
    with pytest.raises(ConfigError, match="num_options = 1 must"):
        MultipleChoiceScorer(num_options=1)


@given(st.sampled_from("ABCD"), st.text(alphabet=string.ascii_lowercase + " .,\n", max_size=40))
@QUICK
def test_what_is_said_before_the_answer_does_not_matter(letter, words):
    assert chosen_option(f"{words} the answer is {letter}.") == letter


# GSM8K


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 - 3 - 4 = 9, 9 * 2 = 18\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### $5", "5"),
        ("#### -7", "-7"),
        ("#### 18.50", "18.5"),
        ("#### 3\nno: #### 4", "4"),
        ("She makes $18.", "18"),
        ("between 3 and 4.5", "4.5"),
        ("it is -.5", "-0.5"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text, expected):
    found = final_number(text)
    assert found == (None if expected is None else final_number(expected))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so 18", "18", 1),
        ("so 18.0", 18, 1),
        ("so 18", "He has 3 ... #### 18", 1),
        ("#### 1,000", "1000", 1),
        ("so 18 or 19", "18", 0),
        ("no number", "18", 0),
    ],
)
def test_gsm8k(text, answer, expected):
    assert reward(GSM8KScorer(), text, answer) == expected


def test_gsm8k_can_insist_on_the_marker():
    strict = GSM8KScorer(needs_marker=True)
    assert (reward(strict, "so 18", "18"), reward(strict, "#### 18", "18")) == (0, 1)


def test_a_solution_without_the_marker_is_no_reference():
    with pytest.raises(ContractError, match="'He has 18 apples' is neither a number nor a solution"):
        reward(GSM8KScorer(), "18", "He has 18 apples")


@given(st.integers(-(10**12), 10**12))
@QUICK
def test_separators_and_layout_do_not_change_a_number(number):
    for text in (f"#### {number}", f"#### {number:,}", f"the total is {number:,}.", f"{number}.00"):
        assert final_number(text) == number


# Format


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n<answer></answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> then <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> end", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a <think> b</think><answer>c</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_the_sections_of_a_text(text, expected):
    assert FormatScorer().score(request_of([text], [None])).rewards.item() == expected


def test_a_form_of_ones_own():
    one = FormatScorer(tags=["plan"]).score(request_of(["<plan>x</plan>", "x"], [None, None]))
    assert one.rewards.tolist() == [1, 0]
    two = FormatScorer(pattern=r"\d+.*").score(request_of(["1\nx", "x1"], [None, None]))
    assert two.rewards.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tags": ["a"], "pattern": "a"}, "are two forms"),
        ({"tags": []}, "at least one"),
        ({"tags": ["a", "a"]}, "must be different"),
        ({"tags": ["<a>"]}, "must be different words"),
        ({"pattern": "["}, "no regular expression"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        FormatScorer(**keywords)


CONTENT = st.text(alphabet=st.characters(exclude_characters="<"), max_size=30)


@given(CONTENT, CONTENT, st.sampled_from(" \n\t"))
@QUICK
def test_any_content_without_tags_may_stand_in_the_sections(first, second, space):
    assert has_sections(f"<t>{first}</t>{space}<a>{second}</a>{space}", ("t", "a"))
    assert not has_sections(f"<t>{first}</t>{space}<a>{second}", ("t", "a"))


# What they share


@pytest.mark.parametrize("scorer", [ExactMatchScorer(), MultipleChoiceScorer(), GSM8KScorer()])
def test_a_missing_answer_raises_under_every_policy_and_names_the_sample(scorer):
    request = request_of(["1", "2"], ["1", None])
    for policy in ("raise", "retry", "drop_group"):
        with pytest.raises(ContractError, match=rf"scorer {scorer.name}: .* 1 samples \(s1\) have no 'answer'"):
            RewardService([scorer], on_failure=policy).score(request)


def test_the_answer_may_have_another_key():
    found = ExactMatchScorer(answer_key="label").score(request_of(["4"], [4], key="label"))
    assert found.rewards.tolist() == [1.0]
    with pytest.raises(ContractError, match=r"have no 'answer'; a row has \['label'\]"):
        ExactMatchScorer().score(request_of(["4"], [4], key="label"))


def test_a_batch_of_n_equals_n_of_one():
    texts, answers = ["so 18", "so 19", "20"], ["18", "18", "20"]
    together = GSM8KScorer().score(request_of(texts, answers)).rewards
    alone = [reward(GSM8KScorer(batch_size=1), text, answer) for text, answer in zip(texts, answers, strict=True)]
    assert together.tolist() == alone == [1, 0, 1]


def test_pictures_are_no_texts():
    request = RewardRequest(sample_ids=["a"], generated={"image": Images(pixels=torch.rand(1, 3, 4, 4))})
    with pytest.raises(ContractError, match="scores generated text; this request has"):
        FormatScorer().score(request)
    with pytest.raises(ContractError, match="no generated text; it has"):
        _ = request.texts
