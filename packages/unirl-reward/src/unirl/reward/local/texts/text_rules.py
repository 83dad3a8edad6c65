"""What rules on generated texts share: one text and one reference answer at a time.

Legend: b samples.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ContractError
from unirl.types.reward import RewardRequest


class AnswerScorer(LocalScorer):
    """Compares every generated text with the reference answer in its row of the data file.

    answer_key: the row's key that holds the answer, a string or a number. A row without it raises ContractError under
    every failure policy: a reference that is missing says nothing about the text.
    """

    def __init__(self, *, name: str, answer_key: str = "answer", batch_size: PositiveInt = 64) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.answer_key = answer_key

    @abstractmethod
    def score_answer(self, text: str, answer: str) -> float:
        """Reward of one text. Raises ContractError for an answer that cannot be a reference."""

    def score_batch(self, request: RewardRequest) -> Tensor:
        """float32 [b]."""
        pairs = zip(request.texts, reference_answers(request, self.answer_key, self.name), strict=True)
        return torch.tensor([self.score_answer(text, answer) for text, answer in pairs])


def reference_answers(request: RewardRequest, key: str, scorer: str) -> list[str]:
    """The reference answer of every sample, as text. Raises ContractError naming the samples that have none."""
    rows = request.metadata or [None] * len(request.sample_ids)
    answers = ["" if row is None or row.get(key) is None else str(row[key]).strip() for row in rows]
    missing = [name for name, answer in zip(request.sample_ids, answers, strict=True) if not answer]
    if missing:
        keys = sorted(next((row for row in rows if row), {}))
        raise ContractError(
            f"scorer {scorer}: the rows of {len(missing)} samples ({', '.join(missing[:4])}) have no {key!r}; a row "
            f"has {keys}. Add it to the data file, or name the right key as answer_key."
        )
    return answers
