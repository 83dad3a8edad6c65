"""Multiple-choice questions as prompts."""

from __future__ import annotations

from typing import Any

from unirl.types.errors import DataError

LETTERS = "ABCDEFGHI"


def multiple_choice(question: str, choices: Any, answer: Any) -> tuple[str, str]:  # Any: values of a data file
    """(prompt, letter): the question with its lettered choices below, a line each, and the letter of the right one.

    answer: a letter of the choices, or one of the choices in its own words. A number is refused: it is unclear whether
    it counts from 0 or from 1, or is a choice itself. Raises DataError.
    """
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f"choices = {choices!r} must be a list of 2 to {len(LETTERS)}")
    texts = [str(choice).strip() for choice in choices]
    letters = LETTERS[: len(texts)]
    if isinstance(answer, str) and answer.strip() in letters and len(answer.strip()) == 1:
        letter = answer.strip()
    elif isinstance(answer, str) and texts.count(answer.strip()) == 1:
        letter = letters[texts.index(answer.strip())]
    else:
        raise DataError(f"answer = {answer!r} must be a letter of {', '.join(letters)}, or exactly one of {texts}")
    return "\n".join([question, *(f"{mark}. {text}" for mark, text in zip(letters, texts, strict=True))]), letter
