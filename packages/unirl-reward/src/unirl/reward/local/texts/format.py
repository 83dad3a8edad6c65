"""A reward for the format that the prompt asks for.

Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2: the format reward in addition to the accuracy reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

DEFAULT_TAGS = ("think", "answer")


class FormatScorer(LocalScorer):
    """1 where the text has the form, else 0. What stands inside is not judged.

    tags: the text is these sections in this order and nothing else but white space, <think>...</think> and
    <answer>...</answer> unless told otherwise; each tag occurs once. pattern: instead, a regular expression that the
    whole text must match ("." matches line ends).
    Raises ConfigError for tags and pattern together, none at all, or a pattern that does not compile.
    """

    card = ScorerCard(
        name="format",
        summary="has the text the sections <think> and <answer>, or the form of a pattern",
        media=("text",),
        low=0,
        high=1,
        typical="0 or 1",
        source="DeepSeek-R1, arXiv 2501.12948",
    )

    def __init__(
        self,
        *,
        tags: Sequence[str] | None = None,
        pattern: str | None = None,
        name: str = "format",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size)
        if tags is not None and pattern is not None:
            raise ConfigError(f"scorer {name}: tags = {list(tags)} and pattern = {pattern!r} are two forms. Give one.")
        self._tags = tuple(DEFAULT_TAGS if tags is None else tags)
        if len(set(self._tags)) < max(len(self._tags), 1) or not all(
            re.fullmatch(r"[\w-]+", tag) for tag in self._tags
        ):
            raise ConfigError(f"scorer {name}: tags = {list(self._tags)} must be different words, at least one")
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"scorer {name}: pattern = {pattern!r} is no regular expression: {error}") from error

    def score_batch(self, request: RewardRequest) -> Tensor:
        """1 or 0, float32 [b]."""
        if self._pattern is not None:
            return torch.tensor([float(self._pattern.fullmatch(text) is not None) for text in request.texts])
        return torch.tensor([float(has_sections(text, self._tags)) for text in request.texts])


def has_sections(text: str, tags: Sequence[str]) -> bool:
    """True if a text is exactly the sections <tag>...</tag>, in order, with white space around them."""
    rest = text
    for tag in tags:
        before, opened, rest = rest.partition(f"<{tag}>")
        _, closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not (opened and closed):
            return False
    return not rest.strip() and all(text.count(mark) == 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>"))
