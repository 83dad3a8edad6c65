"""A reward of 1 for a worked solution whose final number is right.

Source: GSM8K (arXiv 2110.14168), whose solutions end with "#### number".
"""

from __future__ import annotations

import re
from decimal import Decimal

from unirl.reward.card import ScorerCard
from unirl.reward.local.texts.text_rules import AnswerScorer
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ContractError

_NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_BARE = re.compile(rf"(?<![\w.])({_NUMBER})")


class GSM8KScorer(AnswerScorer):
    """1 where the text's number equals the reference's, else 0; a text without a number gets 0.

    The number is the one after the last "####", else the last one of the text (`needs_marker`: else none). Thousands
    separators and a dollar sign are left out, and 18.0 equals 18, unlike in the published comparison of strings.
    The reference is a number, or a solution with "####"; anything else raises ContractError.
    """

    card = ScorerCard(
        name="gsm8k_exact_match",
        summary="is the final number right",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="GSM8K, arXiv 2110.14168",
    )

    def __init__(
        self,
        *,
        needs_marker: bool = False,
        answer_key: str = "answer",
        name: str = "gsm8k_exact_match",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, answer_key=answer_key, batch_size=batch_size)
        self.needs_marker = needs_marker

    def score_answer(self, text: str, answer: str) -> float:
        """1 or 0."""
        reference = final_number(answer, needs_marker=re.fullmatch(_NUMBER, answer.strip()) is None)
        if reference is None:
            raise ContractError(
                f"scorer {self.name}: the reference {answer[-80:]!r} is neither a number nor a solution that ends with "
                "'#### number'"
            )
        return float(final_number(text, needs_marker=self.needs_marker) == reference)


def final_number(text: str, *, needs_marker: bool = False) -> Decimal | None:
    """The number after the last "####", else the last number where no marker is needed; None without one."""
    found = _MARKED.findall(text)
    if not found and not needs_marker:
        found = _BARE.findall(text)
    return Decimal(re.sub(r"[,$]", "", found[-1])) if found else None
