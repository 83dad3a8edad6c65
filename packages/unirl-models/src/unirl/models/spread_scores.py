"""Which scored tokens of a packed row are this rank's, where ranks share its positions, and the scores of all of them.

Legend: N tokens scored, n of them by this rank, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.models.packing import Packing
from unirl.types.protocols.models import TokenExchange


@dataclass(frozen=True, eq=False)
class SpreadScores:
    """The tokens that each rank scores: those that one of its positions predicts."""

    exchange: TokenExchange
    counts: list[int]
    """Tokens of each rank."""
    own: Tensor
    """int64 [n], which of the N tokens this rank scores."""
    places: Tensor
    """int64 [n], the position that predicts each, counted within this rank's part of the row."""
    back: Tensor
    """int64 [N], where each token stands in the scores of all ranks, rank after rank."""

    @classmethod
    def of(cls, places_N: Tensor, packing: Packing, exchange: TokenExchange) -> Self:
        """places_N: int64 [N] on the host, the position of the whole row that predicts each token."""
        lengths = exchange.lengths(sum(packing.lengths))
        ends = torch.tensor(lengths).cumsum(0)
        rank_N = torch.bucketize(places_N, ends, right=True)
        order = rank_N.argsort(stable=True)
        counts = rank_N.bincount(minlength=exchange.size).tolist()
        own, start = order.split(counts)[exchange.rank], ends[exchange.rank] - lengths[exchange.rank]
        return cls(exchange, counts, own, places_N[own] - start, order.argsort())

    def whole(self, scores: Tensor, dim: int) -> Tensor:
        """What each rank has of its n tokens along `dim`, put together in the order of all N. A collective."""
        return self.exchange.gathered(scores, dim, self.counts).index_select(dim, self.back.to(scores.device))
