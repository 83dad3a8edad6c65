"""Reading a judge's answers: ways to write an expected word, and ratings in a text."""

from __future__ import annotations

import re

from unirl.reward.local.judges.judge import JudgeError, Reply

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {str(value): word for value, word in enumerate(NUMBERS)}
_YES_NO = ("yes", "no")


def surface_forms(answer: str) -> list[str]:
    """The ways to open a reply with `answer`.

    Yes and no: "Yes", "yes", " Yes", " yes". A count up to ten: "seven", "Seven", " seven", "7". Any other word as a
    count, without digits. Source: Soft-TIFA of GenEval 2.
    """
    word = _DIGITS.get(answer.strip(), answer.strip()).lower()
    if word in _YES_NO:
        return [word.capitalize(), word, f" {word.capitalize()}", f" {word}"]
    digits = [str(NUMBERS.index(word))] if word in NUMBERS else []
    return [word, word.capitalize(), f" {word}", *digits]


def written_probability(text: str, answer: str) -> float:
    """1 where a reply opens with `answer`, 0 where it opens with another answer of the same kind.

    For judges that give no probabilities. Raises JudgeError for a reply that is no answer: to a question of yes or no
    neither of the two, to a count no number, to anything else no word at all.
    """
    expected = _DIGITS.get(answer.strip(), answer.strip()).lower()
    words = re.findall(r"\w+", text.lower())
    first = _DIGITS.get(words[0], words[0]) if words else ""
    if expected in _YES_NO:
        is_answer = first in _YES_NO
    elif expected in NUMBERS:
        is_answer = first in NUMBERS or first.isdigit()
    else:
        is_answer = bool(first)
    if not is_answer:
        raise JudgeError(f"reply {_shown(text)} is no answer of the kind of {answer!r}")
    return float(first == expected)


def rating(reply: Reply, label: str, low: int, high: int, *, is_expected: bool) -> float:
    """The number that follows `label` in a reply.

    is_expected: of a single digit, sum of value * P(value) / sum of P(value) over the ratings from low to high, from
    the probabilities at that token; the number as written otherwise.
    Raises JudgeError if there is no such number, several that differ, one out of range, or none of its tokens is a
    rating.
    """
    scale = rf"\(\s*{low}\s*-\s*{high}\s*\)"
    number = r"(?<![-.\d])(\d+(?:\.\d+)?)(?![\d.]*\d|\s*-\s*\d)"
    found = list(re.finditer(rf"{re.escape(label)}[^\w\n]*(?:{scale})?[^\w\n]*{number}", reply.text, re.IGNORECASE))
    values = {float(match[1]) for match in found}
    if len(values) != 1:
        what = "no rating" if not values else f"the ratings {sorted(values)}"
        raise JudgeError(f"reply {_shown(reply.text)} gives {what} of {label}, expected one from {low} to {high}")
    value = values.pop()
    if not low <= value <= high:
        raise JudgeError(f"reply {_shown(reply.text)} rates {label} {value:g}, which is not from {low} to {high}")
    return _expected_digit(reply, found[0].start(1), label, low, high) if is_expected else value


def _expected_digit(reply: Reply, place: int, label: str, low: int, high: int) -> float:
    """The mean rating under the probabilities of the token that holds character `place` of the reply."""
    start = 0
    for step in reply.steps:
        end = start + len(step.token)
        if start <= place < end:
            if step.token != reply.text[start:end]:
                break
            weights = {value: 0.0 for value in range(low, high + 1)}
            for token, probability in step.probabilities.items():
                if token.strip().isdecimal() and int(token) in weights:
                    weights[int(token)] += probability
            total = sum(weights.values())
            if total == 0:
                break
            return sum(value * weight for value, weight in weights.items()) / total
        start = end
    raise JudgeError(
        f"reply {_shown(reply.text)} has no probabilities of the ratings {low} to {high} at its rating of {label}. "
        "Set ratings to written."
    )


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 120 else line[:120] + " ...")
