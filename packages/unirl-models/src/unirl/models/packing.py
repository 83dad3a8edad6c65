"""Where samples begin and end that lie end to end in one row, and which of its positions this rank computes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.types.protocols.models import TokenExchange


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the samples of a packed row begin and end."""

    lengths: tuple[int, ...]
    """Positions of each of B samples."""
    boundaries: Tensor
    """int32 [B+1] on the device of the model, starting with 0."""
    exchange: TokenExchange | None = None
    """Between the ranks that each compute a part of the row's positions; None where this one computes all."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(samples, positions of each) of neighbours of equal length: what one call of attention can hold."""
        return [(len(list(equal)), length) for length, equal in itertools.groupby(self.lengths)]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, exchange: TokenExchange | None = None) -> Self:
        """The packing of samples of these lengths."""
        boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), boundaries.to(device), exchange)
