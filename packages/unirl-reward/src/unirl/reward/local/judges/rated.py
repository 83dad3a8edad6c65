"""Scorers whose components are ratings that a judge writes into one reply."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from unirl.reward.base import LocalScorer, Scored
from unirl.reward.local.judges.answers import rating
from unirl.reward.local.judges.judge import Judge, JudgeError, Question
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

Ratings = Literal["expected", "written"]


@dataclass(frozen=True)
class Scale:
    """What the judge rates. labels: component -> what its rating stands after in the reply."""

    labels: Mapping[str, str]
    low: int
    high: int


@bounded("scorer")
class RatedScorer(LocalScorer):
    """Asks one question per sample and reads the ratings of `scale` from the reply; its components are these.

    ratings: "written", the numbers as the judge wrote them; "expected", of every rating the mean under the judge's
    probabilities of the rating tokens, which is finer, and needs a judge with probabilities and whole ratings.
    max_tokens: of a reply.
    A reply without one clear rating of each label is a failed sample, never a number.
    Raises ConfigError for an impossible value.
    """

    scale: ClassVar[Scale]

    def __init__(
        self,
        *,
        judge: Judge,
        ratings: Ratings,
        max_tokens: int,
        component_weights: Mapping[str, float],
        device: str,
        name: str,
        batch_size: PositiveInt,
        normalise: bool = False,
    ) -> None:
        super().__init__(
            name=name, batch_size=batch_size, device=device, component_weights=component_weights, normalise=normalise
        )
        if ratings == "expected" and not judge.has_probabilities:
            raise ConfigError(f"scorer {name}: its judge gives no probabilities. Set ratings to written.")
        if set(component_weights) != set(self.scale.labels):
            raise ConfigError(
                f"scorer {name}: component_weights are of {sorted(component_weights)}, expected exactly "
                f"{sorted(self.scale.labels)}; 0 records a component without rewarding it"
            )
        self._judge = judge
        self.ratings: Ratings = ratings
        self.max_tokens = max_tokens

    @abstractmethod
    def questions(self, request: RewardRequest) -> list[Question]:
        """One question per sample."""

    def modules(self) -> list[nn.Module]:
        """Those of the judge."""
        return self._judge.modules()

    def score_batch(self, request: RewardRequest) -> Scored:
        """Ratings [b] by component."""
        values: dict[str, list[float]] = {key: [] for key in self.scale.labels}
        reasons: list[str | None] = []
        for reply in self._judge.replies(self.questions(request), self.max_tokens):
            try:
                if isinstance(reply, JudgeError):
                    raise reply
                found = {
                    key: rating(reply, label, self.scale.low, self.scale.high, is_expected=self.ratings == "expected")
                    for key, label in self.scale.labels.items()
                }
            except JudgeError as error:
                found = dict.fromkeys(values, math.nan)
                reasons.append(str(error))
            else:
                reasons.append(None)
            for key, value in found.items():
                values[key].append(value)
        return Scored({key: torch.tensor(value) for key, value in values.items()}, reasons)
