"""Compares the boxed answer of a text with a reference, by exact fractions and sympy. Imports no torch.

Sympy's parser evaluates Python, so only expressions of numbers, known names and operators reach it; and it may run
forever, so `boxed_equals` and `verified` are called through `unirl.reward.local.texts.bounded`.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from tokenize import TokenError

import sympy
from sympy.parsing.sympy_parser import (
    convert_xor,
    implicit_multiplication,
    parse_expr,
    standard_transformations,
)

_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "log", "ln", "exp")
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|\*\*|[-+*/^()])")
_TRANSFORMATIONS = (*standard_transformations, convert_xor, implicit_multiplication)
_SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
)
"""What sympy raises on expressions that it cannot digest. Memory and recursion are the caller's budget."""
_TOLERANCE = 1e-9
_LONGEST = 2000
"""Characters of an expression. A longer one is no answer, and the rules below would be slow on it."""

_DROPPED = (
    (re.compile(r"\\(?:left|right|big|Big|displaystyle|!|,|;|:|quad|qquad)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])"), ""),
    (re.compile(r"\\?\$"), ""),
    (re.compile(r"\\?%\s*$"), ""),
    (re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
)


def boxed_equals(text: str, reference: str) -> str:
    """ "1" where the text's answer equals the reference, else "0". The reference may be boxed itself.

    Raises ValueError for a reference without content.
    """
    expected = answer_of(reference)
    if expected is None:
        expected = reference
    if not simplified(expected):
        raise ValueError(f"the reference {reference!r} holds no answer")
    found = answer_of(text)
    return "1" if found is not None and equal(found, expected) else "0"


def answer_of(text: str) -> str | None:
    r"""What stands in the last balanced \boxed{}, after its last "="; else after the last "####"; else None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return re.split(r"(?<![<>!\\])=", boxed)[-1].strip()
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if marker else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \fbox{...} whose braces balance, None without one."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for place in range(match.end(), len(text)):
            character = text[place]
            if character in "{}" and text[place - 1] != "\\":
                depth += 1 if character == "{" else -1
            if depth == 0:
                return text[match.end() : place]
    return None


def equal(found: str, expected: str) -> bool:
    """True if two answers are the same string, the same fraction, or the same expression to sympy.

    Rational numbers are compared exactly. Other expressions are equal where sympy simplifies their difference to 0, or
    where both have values and these differ by less than 1e-9 of the larger (of 1 below 1).
    """
    found, expected = simplified(found), simplified(expected)
    if not found or max(len(found), len(expected)) > _LONGEST:
        return False
    if found == expected:
        return True
    fractions = _fraction(found), _fraction(expected)
    if None not in fractions:
        return fractions[0] == fractions[1]
    values = _expression(found), _expression(expected)
    if values[0] is None or values[1] is None:
        return False
    try:
        return _same(values[0], values[1])
    except _SYMPY_ERRORS:
        return False


def simplified(answer: str) -> str:
    """An answer without what does not change its meaning: spaces, delimiters, units of text, thousands separators."""
    if len(answer) > _LONGEST:
        return answer
    for pattern, replacement in _DROPPED:
        answer = pattern.sub(replacement, answer)
    return re.sub(r"\s+", "", answer).strip(".,;:")


def _fraction(answer: str) -> Fraction | None:
    """Value of a plain number, a/b or \\frac{a}{b}; None otherwise. No exponents: 1e999999999 would fill memory."""
    number = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
    match = re.fullmatch(rf"({number})(?:/({number}))?", answer)
    if match is None:
        match = re.fullmatch(rf"(-?)\\frac\{{({number})\}}\{{({number})\}}", answer)
        if match is None:
            return None
        sign, top, below = match.groups()
    else:
        sign, (top, below) = "", match.groups()
    denominator = Fraction(below) if below is not None else Fraction(1)
    if denominator == 0:
        return None
    return (-1 if sign else 1) * Fraction(top) / denominator


def _expression(answer: str) -> sympy.Basic | None:
    """Sympy's reading of an answer, None where it holds anything but numbers, letters, known functions, operators."""
    plain = _as_text(answer)
    names: dict[str, sympy.Basic] = {}
    words, place = [], 0
    while place < len(plain):
        token = _TOKEN.match(plain, place)
        if token is None:
            return None
        place, word = token.end(), token[1]
        words.append(word)
        if word.isalpha() and word not in _FUNCTIONS:
            if word not in _CONSTANTS and len(word) > 1:
                return None
            names[word] = _CONSTANTS.get(word, sympy.Symbol(word))
    functions = {name: getattr(sympy, name) for name in _FUNCTIONS}
    try:
        return parse_expr(
            " ".join(words),
            local_dict=names,
            global_dict={
                "Integer": sympy.Integer,
                "Float": sympy.Float,
                "Rational": sympy.Rational,
                "Symbol": sympy.Symbol,
                "__builtins__": {},
                **functions,
            },
            transformations=_TRANSFORMATIONS,
        )
    except _SYMPY_ERRORS:
        return None


def _as_text(latex: str) -> str:
    r"""LaTeX's \frac, \sqrt, powers and names of functions as the text that sympy reads."""
    previous = None
    while previous != latex:
        previous = latex
        latex = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", latex)
        latex = re.sub(r"\\frac(\d)(\d)", r"((\1)/(\2))", latex)
        latex = re.sub(r"\\sqrt\[([^\[\]{}]*)\]\{([^{}]*)\}", r"((\2)**(1/(\1)))", latex)
        latex = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", latex)
        latex = re.sub(r"\\sqrt(\d)", r"sqrt(\1)", latex)
        latex = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", latex)
    return re.sub(r"\\([A-Za-z]+)", r" \1 ", latex).replace("{", "(").replace("}", ")").strip()


def _same(found: sympy.Basic, expected: sympy.Basic) -> bool:
    if isinstance(found, sympy.Rational) and isinstance(expected, sympy.Rational):
        return found == expected
    if not (isinstance(found, sympy.Expr) and isinstance(expected, sympy.Expr)):
        return found == expected
    difference = found - expected
    if sympy.simplify(difference) == 0:
        return True
    if difference.free_symbols:
        return False
    scale = max(1.0, abs(complex(expected.evalf())))
    return abs(complex(difference.evalf())) <= _TOLERANCE * scale


def verified(text: str, reference: str) -> str:
    r""" "1" where math-verify finds the text's answer equal to \boxed{reference}, else "0".

    Its own time limits, which are signals, are off: the caller's budget stands for them.
    Raises ValueError for a reference in which math-verify finds no answer.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    boxed = reference if "\\boxed" in reference or "$" in reference else f"\\boxed{{{reference}}}"
    expected = parse(boxed, parsing_timeout=0)
    if not expected:
        raise ValueError(f"math-verify finds no answer in the reference {reference!r}")
    return "1" if verify(expected, parse(text, parsing_timeout=0), timeout_seconds=0) else "0"
