"""Which scored tokens are this rank's, where ranks share the positions of a packed row or deal the tokens out, and the
scores of all of them.

Legend: N tokens scored, n of them by this rank, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.models.packing import Packing
from unirl.types.protocols.models import PartsExchange, TokenExchange


@dataclass(frozen=True, eq=False)
class SpreadScores:
    """The tokens that each rank scores."""

    exchange: PartsExchange
    counts: list[int]
    """Tokens of each rank."""
    own: Tensor
    """int64 [n], which of the N tokens this rank scores."""
    places: Tensor
    """int64 [n], the position that predicts each, counted within what this rank has of the row."""
    back: Tensor
    """int64 [N], where each token stands in the scores of all ranks, rank after rank."""

    @classmethod
    def of(cls, places_N: Tensor, packing: Packing, exchange: TokenExchange) -> Self:
        """Each rank scores what its positions predict.

        places_N: int64 [N] on the host, the position of the whole row that predicts each token.
        """
        lengths = exchange.lengths(sum(packing.lengths))
        ends = torch.tensor(lengths).cumsum(0)
        rank_N = torch.bucketize(places_N, ends, right=True)
        order = rank_N.argsort(stable=True)
        counts = rank_N.bincount(minlength=exchange.size).tolist()
        own, start = order.split(counts)[exchange.rank], ends[exchange.rank] - lengths[exchange.rank]
        return cls(exchange, counts, own, places_N[own] - start, order.argsort())

    @classmethod
    def dealt(cls, places_N: Tensor, exchange: PartsExchange) -> Self:
        """Each rank scores as many, and has all positions. places_N: int64 [N] on the host."""
        counts, all_N = exchange.lengths(len(places_N)), torch.arange(len(places_N))
        own = all_N.split(counts)[exchange.rank]
        return cls(exchange, counts, own, places_N[own], all_N)

    def whole(self, scores: Tensor, dim: int) -> Tensor:
        """What each rank has of its n tokens along `dim`, put together in the order of all N. A collective."""
        return self.exchange.gathered(scores, dim, self.counts).index_select(dim, self.back.to(scores.device))
