"""Exact arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.tools.base import Tool, ToolError, one_text

_MAX_CHARS = 200
_MAX_BITS = 4096
"""Most bits of a number on the way, so that no expression takes long."""
_MAX_DIGITS = 50
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class Calculator(Tool):
    """Sums, differences, products, quotients, remainders and powers of decimal numbers, in brackets.

    Whole numbers are exact; other results have up to 12 decimal places.
    """

    description: str = "Calculate an arithmetic expression with + - * / // % ** and brackets."
    parameters: Mapping[str, Any] = one_text("expression", "for example (3.5 + 4) * 2")  # Any: JSON
    deterministic: bool = True

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:
        """The value. Raises ToolError if it is no such expression, or too long or large."""
        expression = arguments["expression"]
        if len(expression) > _MAX_CHARS:
            raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS}")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise ToolError(f"{expression!r} is no expression") from error
        except RecursionError as error:
            raise ToolError("too many brackets") from error
        return _shown(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)) if abs(number) != float("inf") else None)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _bounded(_BINARY[type(op)](_value(left), _value(right)))
            except ZeroDivisionError as error:
                raise ToolError("division by zero") from error
    raise ToolError("only numbers, + - * / // % ** and brackets are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent must be a whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * size > _MAX_BITS:
        raise ToolError("the number is too large")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    return base**exponent.numerator


def _bounded(value: Fraction | None) -> Fraction:
    if value is None or max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the number is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        text = str(value.numerator)
        if len(text) > _MAX_DIGITS:
            raise ToolError(f"the result has {len(text)} digits; at most {_MAX_DIGITS}")
        return text
    return f"{float(value):.12g}"
