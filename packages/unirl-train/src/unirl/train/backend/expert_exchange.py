"""Expert parallelism: each rank of a group has some of a model's experts, and rows of tokens go to the ranks of their
experts and back.

Gradients of parameters are the mean over ranks, as FSDP reduces them. Where a token is, the gradient of its row is that
of this rank's loss; where its expert is, that of the mean of all ranks' losses, so that rows of all ranks add up in the
weights of the expert. Between the two lies the factor P.

Legend: D width of a row, E experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unirl.train.backend.ulysses import WithAdjoint


class RowExchange:
    """Implements unirl.types.protocols.models.ExpertExchange over a process group.

    bytes_sent: what this rank has sent to others so far, forwards and backwards, counts of rows included.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def counted(self, rows_of_expert: Tensor) -> Tensor:
        """int64 [P, E / P]: the rows that each rank has for this rank's experts, of [E], this rank's own."""
        found = torch.empty_like(rows_of_expert)
        dist.all_to_all_single(found, rows_of_expert, group=self._group)
        self.bytes_sent += rows_of_expert.nbytes // self.size * (self.size - 1)
        return found.view(self.size, -1)

    def to_experts(self, rows: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        """[sum(of_each), D] for this rank's experts, of [sum(to_each), D] for those of each rank, rank after rank."""
        return WithAdjoint.apply(
            rows,
            lambda rows: self._exchanged(rows, to_each, of_each),
            lambda grad: self._exchanged(grad, of_each, to_each) * self.size,
        )

    def to_tokens(self, rows: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        """The way back: [sum(of_each), D] for this rank's tokens, of [sum(to_each), D] for those of each rank."""
        return WithAdjoint.apply(
            rows,
            lambda rows: self._exchanged(rows, to_each, of_each),
            lambda grad: self._exchanged(grad / self.size, of_each, to_each),
        )

    def _exchanged(self, sent: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        received = sent.new_empty(sum(of_each), *sent.shape[1:])
        dist.all_to_all_single(received, sent.contiguous(), list(of_each), list(to_each), group=self._group)
        row_bytes = sent.shape[1] * sent.element_size()
        self.bytes_sent += (len(sent) - to_each[self.rank]) * row_bytes
        return received
