"""Scorers that compare the samples of a group two by two."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from unirl.reward.base import LocalScorer, Scored
from unirl.reward.card import ScorerCard
from unirl.reward.comparisons import Pair, Ranking, bradley_terry, pairs_to_compare, win_rates
from unirl.reward.function import RewardFunction, UserFunction, media_of, metadata_of
from unirl.types.batch import rows_by
from unirl.types.bounds import PositiveInt, UnitInterval, bounded
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.reward import RewardRequest

_RANKINGS: dict[Ranking, Callable[[int, Sequence[Pair], Sequence[float]], list[float]]] = {
    "win_rate": win_rates,
    "bradley_terry": bradley_terry,
}


@bounded("scorer")
class PairwiseScorer(LocalScorer):
    """Compares the samples of each group two by two, and ranks them by what they win.

    opponents: comparisons per sample, an even number; None compares every pair, n (n - 1) / 2 of n samples.
    ranking: "win_rate", the mean over a sample's comparisons of the probability that it is the better one (Pref-GRPO,
    arXiv 2508.20751); "bradley_terry", the strengths that explain the comparisons best, with mean 0 per group.
    max_failed: share of a group's comparisons that may have no answer, which are left out; with more the group fails.
    batch_size: most samples whose groups are compared in one call, at least one group.
    The mean of a group is the same whatever the samples are worth: watch another scorer, of weight 0, to see progress.
    Raises ConfigError for an impossible value.
    """

    is_groupwise = True

    def __init__(
        self,
        *,
        name: str,
        opponents: PositiveInt | None = None,
        ranking: Ranking = "win_rate",
        max_failed: UnitInterval = 0.0,
        batch_size: PositiveInt = 8,
        device: str = "cpu",
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        if ranking not in _RANKINGS:
            raise ConfigError(f"scorer {name}: ranking = {ranking!r} must be one of {', '.join(_RANKINGS)}")
        if opponents is not None and opponents % 2:
            raise ConfigError(
                f"scorer {name}: opponents = {opponents} must be even, so that all samples have equally many. Set it "
                f"to {opponents + 1}, or to null, which compares all."
            )
        self.opponents = opponents
        self.ranking: Ranking = ranking
        self.max_failed = max_failed

    @abstractmethod
    def preferences(self, request: RewardRequest, pairs: Sequence[Pair]) -> Sequence[float | RewardError]:
        """P(the first of each pair of rows is the better one), or why a comparison has no answer."""

    def score_batch(self, request: RewardRequest) -> Scored:
        """Ranks [b] of whole groups."""
        groups = list(rows_by(request.group_ids).values())
        pairs = [pairs_to_compare(len(rows), self.opponents) for rows in groups]
        asked = [(rows[i], rows[j]) for rows, own in zip(groups, pairs, strict=True) for i, j in own]
        answers = iter(self.preferences(request, asked))
        values = [math.nan] * len(request.sample_ids)
        reasons: list[str | None] = [None] * len(request.sample_ids)
        for rows, own in zip(groups, pairs, strict=True):
            ranks, reason = self._ranked(len(rows), own, [next(answers) for _ in own])
            for row, rank in zip(rows, ranks, strict=True):
                values[row], reasons[row] = rank, reason
        return Scored(torch.tensor(values), reasons)

    def _ranked(
        self, num_samples: int, pairs: Sequence[Pair], answers: Sequence[float | RewardError]
    ) -> tuple[list[float], str | None]:
        """One rank per sample of a group, and why one has none."""
        failed = [answer for answer in answers if isinstance(answer, RewardError)]
        if len(failed) > self.max_failed * len(pairs):
            reason = f"{len(failed)} of the {len(pairs)} comparisons of its group have no answer: {failed[0]}"
            return [math.nan] * num_samples, reason
        known = [(pair, win) for pair, win in zip(pairs, answers, strict=True) if not isinstance(win, RewardError)]
        for _, win in known:
            if not 0 <= win <= 1:
                raise ContractError(f"scorer {self.name}: a comparison gave {win}, which is no probability")
        ranks = _RANKINGS[self.ranking](num_samples, [pair for pair, _ in known], [win for _, win in known])
        return ranks, f"none of its comparisons has an answer: {failed[0]}" if failed else None


class PairwiseFunctionScorer(PairwiseScorer):
    """Compares samples by `function(first, second, prompts, metadata, **kwargs)`.

    function: a callable, or its dotted path. It gets the first and the second samples of p comparisons (media as in
    `unirl.reward.function.FunctionRewardScorer`), their prompts, and their rows of the data file, and returns p
    probabilities that the first is the better one: numbers in [0, 1], or booleans. None or NaN: it cannot say.
    batch_size: most samples whose groups are compared in one call. kwargs: passed on to the function.
    Raises ConfigError if the dotted path leads nowhere, and for keywords that the function does not take or lacks.
    """

    card = ScorerCard(
        name="pairwise_function",
        summary="what a sample wins when a Python function of your own compares it with the others of its prompt",
        media=("image", "video", "text", "audio"),
        needs="several samples per prompt",
        typical="win_rate: [0, 1], mean 1/2; bradley_terry: mean 0",
        source="yours; Pref-GRPO, arXiv 2508.20751",
    )
    keywords_of: ClassVar[str] = "function"
    num_inputs: ClassVar[int] = 4

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        name: str | None = None,
        opponents: PositiveInt | None = None,
        ranking: Ranking = "win_rate",
        max_failed: UnitInterval = 0.0,
        batch_size: PositiveInt = 8,
        device: str = "cpu",
        **kwargs: Any,  # Any: the user's own keywords
    ) -> None:
        self._function = UserFunction(function, self.num_inputs, kwargs, unit="comparison")
        super().__init__(
            name=name if name is not None else self._function.name.rpartition(".")[2],
            opponents=opponents,
            ranking=ranking,
            max_failed=max_failed,
            batch_size=batch_size,
            device=device,
        )

    @property
    def source_file(self) -> str | None:
        """The function's own."""
        return self._function.source_file

    def preferences(self, request: RewardRequest, pairs: Sequence[Pair]) -> list[float | RewardError]:
        """What the function says. Raises ContractError if that is not one number per comparison."""
        first, second = (request.select([pair[side] for pair in pairs]) for side in (0, 1))
        found = self._function(media_of(first), media_of(second), first.prompts, metadata_of(first))
        if isinstance(found, Mapping):
            raise ContractError(
                f"reward function {self._function.name} returned a dict; return one number per comparison"
            )
        wins_p = self._function.numbers(found)
        if wins_p.shape != (len(pairs),):
            raise ContractError(
                f"reward function {self._function.name} returned shape {tuple(wins_p.shape)} for {len(pairs)} "
                f"comparisons; expected ({len(pairs)},)"
            )
        unknown = RewardError(f"{self._function.name} cannot say which of two samples is the better one")
        return [unknown if math.isnan(win) else win for win in wins_p.to(torch.float64).tolist()]
