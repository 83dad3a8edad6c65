"""Tool calls: found by tokens, parsed as JSON, answered by tools, and never evaluated."""

import json
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.environments.tools.calculator import Calculator
from unirl.rollout.turns.calls import MalformedCall, ToolCall, Turn, calls_of, parsed_call
from unirl.types.errors import ConfigError

BEGIN, END = 1, 2


def text_of(tokens):
    return "".join(map(chr, tokens))


def found(text):
    """[ and ] stand for the tokens around a call."""
    tokens = [{"[": BEGIN, "]": END}.get(char, ord(char)) for char in text]
    return calls_of(tokens, BEGIN, END, text_of)


def test_calls_are_what_stands_between_their_tokens():
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert found(f"I add [\n{call}\n] and [{call}]") == (ToolCall("add", {"a": 1}),) * 2
    assert found("no call, though <tool_call>{}</tool_call> is spelled") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{]", "no JSON"),
        ("[]", "no JSON"),
        ("[NaN]", "NaN is no JSON"),
        ('[{"name": "add", "arguments": {"a": NaN}}]', "NaN is no JSON"),
        ('["add"]', "a str where"),
        ('[{"name": "add"}]', '"arguments" an object'),
        ('[{"name": 3, "arguments": {}}]', '"name" must be a text'),
        ('[{"name": "add", "arguments": {}, "code": "x"}]', r"unknown keys \['code'\]"),
        ("[" + '{"a":' * 100_000 + "]", "no JSON"),
        ("[half a call", "does not end"),
        ("half a call]", "has not begun"),
        ("[one [two]", "within another"),
    ],
)
def test_what_is_no_call_says_why(text, reason):
    first = found(text)[0]
    assert isinstance(first, MalformedCall)
    assert re.search(reason, first.reason)


@given(st.text())
def test_any_text_is_a_call_or_says_why(text):
    assert isinstance(parsed_call(text), (ToolCall, MalformedCall))


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda x: f"({x[0]}{x[1]}{x[2]})"),
        max_leaves=12,
    )
)
def test_a_calculator_agrees_with_python_on_whole_numbers(expression):
    expected = eval(expression)  # noqa: S307 - digits, brackets and + - * that this test has made
    try:
        assert Calculator()({"expression": expression}, {}) == str(expected)
    except ToolError as error:
        assert "characters" in str(error) and len(expression) > 200 or "digits" in str(error)


@given(st.integers(-99, 99), st.integers(1, 99))
def test_quotients_have_twelve_digits(a, b):
    shown = Calculator()({"expression": f"({a}) / {b}"}, {})
    assert math.isclose(float(shown), Fraction(a, b), rel_tol=1e-11)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("__import__('os').system('true')", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("9**9**9", "too large"),
        ("1e400", "too large"),
        ("(2**4000) * (2**4000)", "too large"),
        ("2**2000", "digits"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "whole number"),
        ("1 +", "no expression"),
        ("(" * 150 + "1" + ")" * 40, "no expression|brackets"),
        ("1" * 300, "at most 200"),
        ("\0", "no expression"),
    ],
)
def test_a_calculator_refuses_what_is_no_arithmetic(expression, reason):
    with pytest.raises(ToolError, match=reason):
        Calculator()({"expression": expression}, {})


def episode(**options):
    own = ToolUse({"calculator": Calculator()}, **options).fresh()
    assert own.reset({"answer": "3"}, 0) == ()
    return own


def turn(*calls):
    return Turn("", tuple(calls))


def sum_of(expression):
    return ToolCall("calculator", {"expression": expression})


def test_each_call_gets_a_message_and_a_turn_without_calls_ends_the_episode():
    own = episode(cost_per_call=0.5)
    step = own.step(turn(sum_of("1+2"), sum_of("1/0"), MalformedCall("no JSON")))
    assert [message.content for message in step.observation] == ["3", "error: division by zero", "error: no JSON"]
    assert {message.role for message in step.observation} == {"tool"}
    assert step.reward == -1.5 and not step.terminated
    assert step.counts == {"calls": 3, "malformed_calls": 1, "tool_errors": 1}
    assert own.step(turn()).terminated


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (ToolCall("adder", {}), "error: there is no tool 'adder'; there are calculator"),
        (ToolCall("calculator", {}), "error: 'expression' is a required property"),
        (ToolCall("calculator", {"expression": 3}), "error: 3 is not of type 'string'"),
        (ToolCall("calculator", {"expression": "1", "x": 1}), "error: Additional properties are not allowed"),
    ],
)
def test_a_call_that_fits_no_tool_is_answered_with_the_mistake(call, answer):
    step = episode().step(turn(call))
    assert step.observation[0].content.startswith(answer)
    assert step.counts["malformed_calls"] == 1


def test_calls_and_answers_are_bounded():
    own = episode(max_calls=1, max_chars=4)
    step = own.step(turn(sum_of("10**9"), sum_of("1")))
    assert [message.content for message in step.observation] == [
        "1000... (6 characters more)",
        "erro... (27 characters more)",
    ]


def test_tools_are_described_as_chat_templates_take_them():
    (schema,) = ToolUse({"calculator": Calculator()}).schemas
    assert json.loads(json.dumps(schema)) == schema
    assert schema["type"] == "function" and schema["function"]["name"] == "calculator"
    with pytest.raises(ConfigError, match="tools is empty"):
        ToolUse({})
