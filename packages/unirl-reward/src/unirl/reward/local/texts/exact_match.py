"""A reward of 1 for a text that is the answer, word for word."""

from __future__ import annotations

import re

from unirl.reward.card import ScorerCard
from unirl.reward.local.texts.text_rules import AnswerScorer
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError


class ExactMatchScorer(AnswerScorer):
    """1 where the text, without the white space around it, equals the reference answer, else 0.

    pattern: regular expression with one group, whose last match in the text is compared instead of the whole text; a
    text without a match gets 0. is_case_sensitive: whether "Paris" and "paris" differ.
    Raises ConfigError for a pattern that does not compile or has another number of groups.
    """

    card = ScorerCard(
        name="exact_match",
        summary="is the text, or what a pattern finds in it, the answer",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="plain comparison",
    )

    def __init__(
        self,
        *,
        pattern: str | None = None,
        is_case_sensitive: bool = True,
        answer_key: str = "answer",
        name: str = "exact_match",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, answer_key=answer_key, batch_size=batch_size)
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"scorer {name}: pattern = {pattern!r} is no regular expression: {error}") from error
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError(
                f"scorer {name}: pattern = {pattern!r} has {self._pattern.groups} groups; put one around the answer, "
                "and make the others (?:...)."
            )
        self._is_case_sensitive = is_case_sensitive

    def score_answer(self, text: str, answer: str) -> float:
        """1 or 0."""
        if self._pattern is not None:
            found = self._pattern.findall(text)
            if not found:
                return 0.0
            text = found[-1]
        text, answer = text.strip(), answer.strip()
        if not self._is_case_sensitive:
            text, answer = text.casefold(), answer.casefold()
        return float(text == answer)
