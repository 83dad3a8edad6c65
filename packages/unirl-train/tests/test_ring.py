"""Ring attention over gloo ranks is the attention of one process, forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import results_of_ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unirl.train.backend.block_attention import Attended, block_attention, joined, kernel_of
from unirl.train.backend.ring import RingExchange

pytestmark = pytest.mark.slow
LENGTHS = (5, 4, 3)
"""Tokens of each rank."""
WIDTH, HEADS, KEY_HEADS = 6, 4, 2


def problem(*, is_masked: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Queries, keys and values of all ranks, a mask [B, 1, T, T] and the gradient of the output."""
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    tensors = [
        torch.randn(2, heads, total, WIDTH, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    mask = torch.rand(2, 1, total, total, generator=generator) > 0.5
    mask[1, 0, 3] = False  # a query without keys
    mask[0, 0, :5, 5:9] = False  # a block without pairs of one sample
    grad = torch.randn(2, HEADS, total, WIDTH, dtype=torch.float64, generator=generator)
    return [each.to(dtype) for each in tensors], mask if is_masked else None, grad.to(dtype)


@dataclass
class Blocks:
    """A mask by blocks. skipped: pairs of ranks that are said to have no pairs."""

    whole: Tensor
    rank: int
    skipped: tuple[tuple[int, int], ...] = ()

    def has_pairs(self, rank: int) -> bool:
        return (self.rank, rank) not in self.skipped

    def mask(self, rank: int) -> Tensor:
        return self.whole.split(list(LENGTHS), 2)[self.rank].split(list(LENGTHS), 3)[rank]


def ring_of_rank(is_masked: bool, skipped: tuple[tuple[int, int], ...] = (), scale: float | None = None) -> Any:
    """Output, gradients and bytes sent of this rank."""
    world = dist.group.WORLD
    assert world is not None
    ring = RingExchange(world)
    tensors, mask, grad = problem(is_masked=is_masked)
    own = [each.split(list(LENGTHS), 2)[ring.rank].clone().requires_grad_() for each in tensors]
    masks = None if mask is None else Blocks(mask, ring.rank, skipped)
    out = ring.attention(*own, lengths=LENGTHS, masks=masks, scale=scale)
    out.backward(grad.split(list(LENGTHS), 2)[ring.rank])
    return out.detach(), [each.grad for each in own], ring.bytes_sent


def whole(mask: Tensor | None, tensors: list[Tensor], grad: Tensor, scale: float | None = None) -> tuple[Tensor, Any]:
    """Attention of one process and the gradients of its arguments. A query without keys has zeros."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=grad.dtype).masked_fill(~mask, float("-inf"))
    out = scaled_dot_product_attention(*leaves, attn_mask=bias, enable_gqa=True, scale=scale)
    out.backward(grad)
    return out.detach(), [each.grad for each in leaves]


@pytest.mark.parametrize(
    ("is_masked", "skipped", "scale"), [(False, (), None), (True, (), 0.3), (True, ((0, 1), (2, 0)), None)]
)
def test_ranks_of_a_ring_find_what_one_process_does(
    is_masked: bool, skipped: tuple[tuple[int, int], ...], scale: float | None, tmp_path: Path
) -> None:
    tensors, mask, grad = problem(is_masked=is_masked)
    starts = [sum(LENGTHS[:rank]) for rank in range(len(LENGTHS))]
    for query, key in skipped:
        assert mask is not None
        rows = slice(starts[query], starts[query] + LENGTHS[query])
        mask[:, :, rows, starts[key] : starts[key] + LENGTHS[key]] = False
    expected, grads = whole(mask, tensors, grad, scale)
    ranks = results_of_ranks(partial(ring_of_rank, is_masked, skipped, scale), tmp_path, world_size=3)
    found = torch.cat([out for out, _, _ in ranks], 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for place, expected_grad in enumerate(grads):
        own = torch.cat([of_rank[place] for _, of_rank, _ in ranks], 2)
        torch.testing.assert_close(own, expected_grad, rtol=0, atol=1e-13)
    per_token = 2 * 2 * KEY_HEADS * WIDTH * 8  # keys and values of two samples
    for rank, (_, _, sent) in enumerate(ranks):
        passed_on = sum(LENGTHS) - LENGTHS[(rank + 1) % 3]
        assert sent == (2 * passed_on + sum(LENGTHS)) * per_token


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_blocks_of_keys_add_up_to_attention_over_all_of_them(dtype: torch.dtype, tolerance: float) -> None:
    (query, key, value), mask, _ = problem(is_masked=True, dtype=dtype)
    assert mask is not None
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    kernel, scale = kernel_of(torch.device("cpu")), WIDTH**-0.5
    parts = zip(*(each.split(list(LENGTHS), dim) for each, dim in ((key, 2), (value, 2), (mask, 3))), strict=True)
    blocks = [block_attention(kernel, query, *part, scale) for part in parts]
    blocks = [Attended(out.to(lse.dtype), lse) for out, lse in blocks]
    first, second, third = blocks
    for found in (joined(joined(first, second), third), joined(third, joined(second, first))):
        scores = (query.double() @ key.double().mT * scale).masked_fill(~mask, float("-inf"))
        expected = (scores.softmax(-1).nan_to_num() @ value.double()).to(found.out.dtype)
        torch.testing.assert_close(found.out, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.lse.double(), scores.logsumexp(-1), rtol=tolerance, atol=tolerance)
    assert (found.lse[1, :, 3] == float("-inf")).all()
    assert not found.out[1, :, 3].any()
