"""Ring attention (arXiv 2310.01889): queries stay where their tokens are, keys and values go around the ranks.

After k steps a rank has the keys and values of the rank k places before it. What its queries find in each block adds up
by the sums of the blocks, so no rank ever holds all tokens. In the backward pass the gradients of keys and values go
around with them, and one step further, home.
Legend: B samples, H heads of queries, H' of keys and values, t tokens of a rank, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unirl.train.backend.block_attention import Attended, BlockKernel, bias_of, block_attention, joined, kernel_of
from unirl.train.backend.collectives import RankCollectives
from unirl.train.backend.ulysses import UlyssesExchange
from unirl.types.protocols.models import BlockMasks
from unirl.types.roles import MeshPlace


class RingExchange:
    """Implements unirl.types.protocols.models.TokenRing over a process group.

    bytes_sent: what this rank has sent on so far, forwards and backwards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Tokens that each rank of the ring attends with: those of neighbours that exchange heads."""
        each = len(lengths) // self.size
        return [sum(lengths[first : first + each]) for first in range(0, len(lengths), each)]

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int],
        masks: BlockMasks | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of this rank's queries [B, H, t, D] to keys and values [B, H', t, D] of all ranks."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        walk = _Walk(self, kernel_of(query.device), tuple(lengths), masks, scale)
        return _RingAttention.apply(walk, query, key, value)

    def pass_on(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Passing:
        """Begin to give tensors to the next rank and to take those of the one before. shapes: of what comes."""
        flat = torch.cat([each.reshape(-1) for each in sent])
        received = flat.new_empty(sum(map(math.prod, shapes)))
        to_each, of_each = [0] * self.size, [0] * self.size
        to_each[(self.rank + 1) % self.size] = len(flat)
        of_each[(self.rank - 1) % self.size] = len(received)
        work = dist.all_to_all_single(received, flat, of_each, to_each, group=self._group, async_op=True)
        self.bytes_sent += flat.nbytes
        return Passing(work, flat, received, [tuple(shape) for shape in shapes])


def token_exchange(collectives: RankCollectives, place: MeshPlace, device: torch.device) -> UlyssesExchange | None:
    """How the tokens of a sample are spread over ranks; None where each has all. Raises ConfigError for a ring on a
    device without a kernel for it."""
    if place.sp_size == 1:
        return None
    if place.ring_size == 1:
        return UlyssesExchange(collectives.group("sp"))
    kernel_of(device)
    ring = RingExchange(collectives.group("ring"))
    return UlyssesExchange(collectives.group("sp"), collectives.group("heads"), ring)


@dataclass(frozen=True, eq=False)
class Passing:
    """Tensors on their way."""

    work: Any  # Any: torch's handle; None where nothing is computed
    sent: Tensor
    """Kept until it has arrived."""
    received: Tensor
    shapes: list[tuple[int, ...]]

    def arrived(self) -> list[Tensor]:
        """Wait for what comes."""
        if self.work is not None:
            self.work.wait()
        parts = self.received.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class _Walk:
    """One attention over the ring."""

    ring: RingExchange
    kernel: BlockKernel
    lengths: tuple[int, ...]
    masks: BlockMasks | None
    scale: float

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank with its keys and values: this one, then those before it. The next are on their way meanwhile."""
        source = self.ring.rank
        for step in range(self.ring.size):
            following = self.before(source)
            coming = None
            if step + 1 < self.ring.size:
                coming = self.ring.pass_on((key, value), [self.shape(key, following)] * 2)
            yield source, key, value
            if coming is not None:
                key, value = coming.arrived()
            source = following

    def before(self, source: int) -> int:
        """The rank whose keys come after those of `source`."""
        return (source - 1) % self.ring.size

    def has_pairs(self, source: int) -> bool:
        return self.masks is None or self.masks.has_pairs(source)

    def mask(self, source: int) -> Tensor | None:
        return None if self.masks is None else self.masks.mask(source)

    def shape(self, like: Tensor, source: int) -> tuple[int, ...]:
        """The shape of the keys of a rank. like: those of another."""
        return (*like.shape[:2], self.lengths[source], like.shape[3])


class _RingAttention(torch.autograd.Function):
    """Attention of the queries of each rank to the keys and values of all."""

    @staticmethod
    def forward(ctx: Any, walk: _Walk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # Any: as torch has it
        shared = query.shape[1] // key.shape[1]
        found = None
        for source, keys, values in walk.blocks(key, value):
            if not walk.has_pairs(source):
                continue
            pairs = (_for_all_heads(each, shared) for each in (keys, values))
            own = _precise(block_attention(walk.kernel, query, *pairs, walk.mask(source), walk.scale))
            found = own if found is None else joined(found, own)
        if found is None:
            found = Attended(torch.zeros_like(query), query.new_zeros(query.shape[:3]))
        out = found.out.to(query.dtype)
        # Weights of a query without keys are exp(-inf - lse): zero for any finite sum.
        lse = found.lse.masked_fill(found.lse == float("-inf"), 0)
        ctx.walk = walk
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # Any: as torch has it
        walk = ctx.walk
        query, key, value, *whole = ctx.saved_tensors
        shared = query.shape[1] // key.shape[1]
        grad, of_query = grad_outputs[0].contiguous(), torch.zeros_like(query, dtype=whole[1].dtype)
        arrived: Callable[[], list[Tensor]] = partial(_zeros_like, (key, value))
        for source, keys, values in walk.blocks(key, value):
            own = _zeros_like((keys, values))
            if walk.has_pairs(source):
                tensors = (query, _for_all_heads(keys, shared), _for_all_heads(values, shared))
                bias = bias_of(walk.mask(source), query, tensors[1])
                first, *rest = walk.kernel.backward(grad, tensors, bias, Attended(*whole), walk.scale)
                of_query += first
                own = [_of_shared_heads(each, shared) for each in rest]
            own = [of_ranks_before + each for of_ranks_before, each in zip(arrived(), own, strict=True)]
            # What arrives is of the keys that come next, and in the end of this rank's own.
            arrived = walk.ring.pass_on(own, [walk.shape(key, walk.before(source))] * 2).arrived
        return None, of_query.to(query.dtype), *arrived()


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(each) for each in tensors]


def _precise(found: Attended) -> Attended:
    """Blocks add up in float32 at least."""
    return Attended(found.out.to(found.lse.dtype), found.lse)


def _for_all_heads(tensor: Tensor, shared: int) -> Tensor:
    """Keys or values, once for each head of queries that asks them."""
    return tensor.repeat_interleave(shared, 1) if shared > 1 else tensor


def _of_shared_heads(grad: Tensor, shared: int) -> Tensor:
    """The adjoint of `_for_all_heads`."""
    return grad.unflatten(1, (-1, shared)).sum(2) if shared > 1 else grad
