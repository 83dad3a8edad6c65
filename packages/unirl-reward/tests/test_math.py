"""Equality of mathematical answers: cases worked by hand, math-verify itself, and expressions that never end."""

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from unirl.reward.local.texts import math_equality
from unirl.reward.local.texts.bounded import BoundedFunction, OverBudgetError
from unirl.reward.local.texts.math_boxed import BoxedMathScorer
from unirl.reward.local.texts.math_equality import answer_of, equal
from unirl.reward.local.texts.math_verify import MathVerifyScorer
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.reward import RewardRequest


def request_of(texts, answers):
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(texts))],
        generated={"text": Texts(texts=list(texts))},
        metadata=[{"answer": answer} for answer in answers],
    )


@pytest.fixture(scope="module")
def boxed():
    scorer = BoxedMathScorer(cpu_s=3)  # the first comparison imports, on a busy core for a second
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def math_verify():
    scorer = MathVerifyScorer()
    yield scorer
    scorer.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x = 4}", "4"),
        (r"\boxed{x \le 4}", r"x \le 4"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        ("6 * 7\n#### 42\nbye", "42"),
        ("42", None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text, expected):
    assert answer_of(text) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", "1/2"),
        (r"-\frac{3}{4}", "-0.75"),
        ("1,000", "1000"),
        ("10{,}000", "10000"),
        (r"50\%", "50"),
        (r"30^\circ", "30"),
        (r"5\text{ cm}", "5cm"),
        (r"\left( x+1 \right)^2", "x^2+2x+1"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"\sqrt[3]{27}", "3"),
        (r"2\pi", "6.283185307"),
        ("2 x", r"x \cdot 2"),
        (r"\cos(0)", "1"),
        (r"x^{10}", "x^10"),
        (r"(1, 2)", r"\left(1,2\right)"),
    ],
)
def test_equal_answers(found, expected):
    assert equal(found, expected) and equal(expected, found)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("0.333", "1/3"),
        ("10000000001", "10000000002"),
        ("x+1", "x+2"),
        (r"\sqrt{2}", "1.4142"),
        ("1/0", "1"),
        ("(1,2)", "(2,1)"),
        ("", "0"),
        ("(((", "1"),
        ("blue", "red"),
        ("1" * 3000, "1"),
    ],
)
def test_answers_that_differ(found, expected):
    assert not equal(found, expected) and not equal(expected, found)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('exit 3')",
        "().__class__.__bases__",
        "exec(1)",
        "lambda",
        "sqrt.__globals__",
        "open(1)",
        "sin.func",
    ],
)
def test_code_in_an_answer_never_reaches_the_parser(text, monkeypatch):
    seen = []
    monkeypatch.setattr(math_equality, "parse_expr", lambda *arguments, **keywords: seen.append(arguments))
    assert not equal(text, "1+x") and len(seen) == 1, "only the reference was parsed"


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_fraction_equals_itself_expanded_and_no_neighbour(top, below, factor):
    assert equal(f"{top * factor}/{below * factor}", rf"\frac{{{top}}}{{{below}}}")
    assert not equal(f"{top * factor + 1}/{below * factor}", f"{top}/{below}")


def test_boxed_rewards_and_a_batch(boxed):
    texts = [r"\boxed{\frac{1}{2}}", "#### 0.5", "0.5", r"\boxed{2}", r"\boxed{x=\frac{2}{4}}"]
    found = boxed.score(request_of(texts, ["0.5", r"\boxed{1/2}", "0.5", "0.5", "The half #### 0.5"]))
    assert found.rewards.tolist() == [1, 1, 0, 0, 1]


CASES = [
    (r"The answer is $\boxed{\frac{1}{2}}$", "0.5"),
    (r"\boxed{\{1,2,3\}}", r"\{3, 2, 1\}"),
    (r"$x \in [0, 1)$", "[0,1)"),
    (r"so it is 12", "12"),
    (r"\boxed{13}", "12"),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2"),
    ("I give up", "3"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"Thus $y = 3$", "$3$"),
]


def test_math_verify_rewards_are_those_of_the_package(math_verify):
    texts, answers = zip(*CASES, strict=True)
    gold = [parse(answer if "$" in answer else rf"\boxed{{{answer}}}") for answer in answers]
    expected = [float(verify(each, parse(text))) for each, text in zip(gold, texts, strict=True)]
    assert 0 < sum(expected) < len(expected)
    assert math_verify.score(request_of(texts, answers)).rewards.tolist() == expected


def test_an_expression_that_never_ends_is_not_equal_and_the_next_one_is_judged(boxed, caplog):
    bombs = [r"\boxed{9^{9^{9^9}}}", rf"\boxed{{{'(' * 900}1{')' * 900}}}"]
    found = boxed.score(request_of([*bombs, r"\boxed{4}"], ["4"] * 3))
    assert found.rewards.tolist() == [0, 0, 1]
    assert any("so 0" in record.message for record in caplog.records)


def test_a_reference_without_an_answer_raises(boxed, math_verify):
    with pytest.raises(ContractError, match=r"scorer math_boxed: the reference '\$\$' holds no answer"):
        boxed.score(request_of([r"\boxed{1}"], ["$$"]))
    with pytest.raises(ContractError, match="scorer math_verify: math-verify finds no answer"):
        math_verify.score(request_of([r"\boxed{1}"], ["$ $"]))


def test_a_budget_below_a_second_is_refused():
    with pytest.raises(ConfigError, match="cpu_s = 0 must be at least 1"):
        BoxedMathScorer(cpu_s=0)


def test_without_math_verify_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"scorer math_verify needs math-verify.*unirl-reward\[math\]"):
        MathVerifyScorer()


# The other process


@pytest.mark.parametrize(
    ("function", "argument", "error", "message"),
    [
        ("time.sleep", "x", RuntimeError, "ended with status"),
        ("json.loads", "{", ValueError, "Expecting property name"),
        ("no_such_module.f", "x", RuntimeError, "did not start: it closed its output"),
    ],
)
def test_what_goes_wrong_in_the_process_is_told(function, argument, error, message):
    bounded = BoundedFunction(function, cpu_s=1, memory_bytes=2**32)
    with pytest.raises(error, match=message):
        bounded(argument)
    bounded.close()


def test_memory_and_cpu_are_bounded_and_the_function_works_again_after():
    bounded = BoundedFunction("builtins.eval", cpu_s=1, memory_bytes=2**30)
    with pytest.raises(OverBudgetError, match="more memory than it may"):
        bounded("'x' * 2**31")
    with pytest.raises(OverBudgetError, match="more than 1 CPU seconds"):
        bounded("sum(1 for _ in iter(int, 1))")
    assert bounded("1 + 1") == "2"
    bounded.close()
    bounded.close()
