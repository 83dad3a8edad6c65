"""Which of several lettered options a text chooses."""

from __future__ import annotations

import re
from typing import Annotated

from unirl.reward.card import ScorerCard
from unirl.reward.local.texts.text_rules import AnswerScorer
from unirl.types.bounds import Bounds, PositiveInt, bounded
from unirl.types.errors import ContractError

_MARKS = r"[\s:*_`\"'(\[{$]*(?:\\boxed\{|\\text\{)*\s*\(?"
"""What may stand between "answer is" and the letter: a colon, emphasis, brackets, LaTeX."""


@bounded("scorer")
class MultipleChoiceScorer(AnswerScorer):
    """1 where the text chooses the reference option, else 0; a text that chooses none gets 0.

    num_options: A, B, ... ; digits 1, 2, ... stand for them, in the answer of the data and after "answer is".
    The choice is what follows the last "answer is" or "answer:", else the last capital letter of the options that
    stands alone. The reference is one option, as a letter or a digit; anything else, as an index that counts from 0,
    raises ContractError.
    """

    card = ScorerCard(
        name="mc_exact_match",
        summary="does the text choose the right option",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="multiple-choice benchmarks as MMLU, arXiv 2009.03300",
    )

    def __init__(
        self,
        *,
        num_options: Annotated[int, Bounds(ge=2, le=9)] = 4,
        answer_key: str = "answer",
        name: str = "mc_exact_match",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, answer_key=answer_key, batch_size=batch_size)
        self._letters = "ABCDEFGHI"[:num_options]

    def score_answer(self, text: str, answer: str) -> float:
        """1 or 0."""
        reference = re.fullmatch(rf"\(?([{self._letters}1-{len(self._letters)}])[).]?", answer.strip().upper())
        if reference is None:
            raise ContractError(
                f"scorer {self.name}: the reference {answer!r} is none of the options {', '.join(self._letters)} "
                f"(or 1 to {len(self._letters)}). Count from 1, or set num_options."
            )
        return float(chosen_option(text, self._letters) == option_of(reference[1], self._letters))


def chosen_option(text: str, letters: str = "ABCD") -> str | None:
    """The letter that a text chooses, None where it chooses none."""
    options = rf"[{letters}1-{len(letters)}]"
    stated = re.findall(rf"answer\s*(?:is|:){_MARKS}({options})(?![a-z0-9])", text, re.IGNORECASE)
    if stated:
        return option_of(stated[-1].upper(), letters)
    alone = re.findall(rf"(?<![A-Za-z0-9])([{letters}])(?![A-Za-z0-9'])", text)
    return alone[-1] if alone else None


def option_of(mark: str, letters: str) -> str:
    """The letter that a letter or a digit stands for."""
    return letters[int(mark) - 1] if mark.isdigit() else mark
