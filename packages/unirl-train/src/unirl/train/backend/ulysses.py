"""Sequence parallelism after DeepSpeed-Ulysses (arXiv 2309.14509): ranks that work on the same samples hold parts of
their tokens, and exchange tokens for heads around each attention.

Every rank differentiates the same loss, and gradients of parameters are the mean over ranks, as FSDP reduces them. So
the objective is the mean of the ranks' losses, and the gradient of each exchange is its adjoint in that objective.

Legend: B samples, H heads, T tokens of P ranks, t tokens of one, D width of a head, P ranks that exchange heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unirl.types.protocols.models import TokenRing


class GatheringExchange:
    """Implements unirl.types.protocols.models.PartsExchange over a process group. Items need not divide evenly.

    bytes_sent: what this rank has sent to others so far, forwards and backwards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def lengths(self, length: int) -> list[int]:
        """How many of `length` items each rank has: they differ by one at most, the first ranks have more."""
        return [length // self.size + (rank < length % self.size) for rank in range(self.size)]

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The items of all ranks along `dim`, rank after rank. lengths: of each."""

        def adjoint(grad: Tensor) -> Tensor:
            # All ranks have the same gradient here, since they differentiate the same loss of the same samples: the sum
            # over them of this rank's part needs no communication.
            return grad.split(list(lengths), dim)[self.rank] * self.size

        return WithAdjoint.apply(part, lambda own: self._all_gathered(own, dim, lengths), adjoint)

    def _all_gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        # Parts of fewer tokens are padded on the way.
        moved = part.movedim(dim, 0).contiguous()
        padded = moved.new_zeros((max(lengths), *moved.shape[1:]))
        padded[: len(moved)] = moved
        found = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self._group)
        self.bytes_sent += (self.size - 1) * padded.nbytes
        parts = [each[:length] for each, length in zip(found, lengths, strict=True)]
        return torch.cat(parts).movedim(0, dim)


class UlyssesExchange(GatheringExchange):
    """Implements unirl.types.protocols.models.TokenExchange over a process group. Tokens need not divide evenly.

    heads: neighbours that exchange tokens for heads, all ranks of the group where there is no ring.
    """

    def __init__(
        self, group: dist.ProcessGroup, heads: dist.ProcessGroup | None = None, ring: TokenRing | None = None
    ) -> None:
        super().__init__(group)
        self._heads = group if heads is None else heads
        self._head_rank = dist.get_rank(self._heads)
        self.num_head_parts = dist.get_world_size(self._heads)
        self.ring = ring

    def of_heads(self, lengths: Sequence[int]) -> list[int]:
        """Tokens of each of the ranks with which this one exchanges heads."""
        first = self.rank - self._head_rank
        return list(lengths[first : first + self.num_head_parts])

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of the tokens along `dim`."""
        return whole.split(self.lengths(whole.shape[dim]), dim)[self.rank].contiguous()

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """[..., H, t, D] of this rank's tokens -> [..., H / P, T, D]: its heads of the tokens of P ranks that exchange
        heads, rank after rank.

        lengths: tokens of each rank of the group.
        """
        if self.num_head_parts == 1:
            return own
        parts = self.of_heads(lengths)
        return WithAdjoint.apply(
            own, lambda own: self._tokens_for_heads(own, parts), lambda grad: self._heads_for_tokens(grad, parts)
        )

    def to_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """The inverse of `to_heads`."""
        if self.num_head_parts == 1:
            return own
        parts = self.of_heads(lengths)
        return WithAdjoint.apply(
            own, lambda own: self._heads_for_tokens(own, parts), lambda grad: self._tokens_for_heads(grad, parts)
        )

    def _tokens_for_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        *batch, num_heads, num_own, width = own.shape
        ranks = self.num_head_parts
        to_each = own.unflatten(-3, (ranks, num_heads // ranks)).movedim(-4, 0)  # [P, ..., H / P, t, D]
        shape = [*batch, num_heads // ranks]
        pieces = [[*shape, length, width] for length in lengths]
        found = self._exchanged(to_each.reshape(-1), [to_each[0].numel()] * ranks, [math.prod(s) for s in pieces])
        return torch.cat([part.view(piece) for part, piece in zip(found, pieces, strict=True)], -2)

    def _heads_for_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        *batch, num_heads, _, width = own.shape
        to_each = [part.reshape(-1) for part in own.split(list(lengths), -2)]
        piece = [*batch, num_heads, lengths[self._head_rank], width]
        found = self._exchanged(torch.cat(to_each), [len(part) for part in to_each], [math.prod(piece)] * len(to_each))
        return torch.cat([part.view(piece) for part in found], -3)

    def _exchanged(self, sent: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> tuple[Tensor, ...]:
        """What each rank sends this one, `of_each` elements. sent: `to_each` elements for each, one after the other."""
        received = sent.new_empty(sum(of_each))
        dist.all_to_all_single(received, sent, list(of_each), list(to_each), group=self._heads)
        self.bytes_sent += (len(sent) - to_each[self._head_rank]) * sent.element_size()
        return received.split(list(of_each))


class WithAdjoint(torch.autograd.Function):
    """compute(tensor), whose gradient is adjoint(gradient)."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, compute: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:  # Any: as torch has it
        ctx.adjoint = adjoint
        return compute(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # Any: as torch has it
        return ctx.adjoint(grad_outputs[0]), None, None
