"""Attention to a block of the keys with the logarithm of its sum, by which blocks add up; torch's own kernels.

    out = softmax(s) v,  lse = log sum exp s,  s = scale q k^T + bias

The gradient of a block needs `out` and `lse` of all blocks: its weights are exp(s - lse).
Legend: B samples, H heads, t queries, u keys, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from unirl.train.backend.rules import no_ring
from unirl.types.device_kinds import kind_of
from unirl.types.errors import ConfigError

aten = torch.ops.aten
LONGEST_HEAD = 256
"""Width of a head up to which flash attention exists."""


class Attended(NamedTuple):
    """What queries found in some keys."""

    out: Tensor
    """[B, H, t, D]"""
    lse: Tensor
    """[B, H, t] float32, float64 for doubles; -inf for a query for which no key counts, whose `out` is zero."""


class BlockKernel(Protocol):
    """Attention to a block, forwards and backwards. bias: [B, H, t, u] of the dtype of the queries, or None."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Attended:
        """Attention of query [B, H, t, D] to key and value [B, H, u, D]. Of a query without keys anything finite."""
        ...

    def backward(
        self,
        grad: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        whole: Attended,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value. tensors: these. grad: of `whole.out`. whole: of all blocks, finite."""
        ...


class CPUKernel:
    """PyTorch's fused attention of CPUs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Attended:
        found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
        return Attended(*found)

    def backward(
        self,
        grad: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        whole: Attended,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, *tensors, *whole, 0.0, False, attn_mask=bias, scale=scale)


class FusedKernel:
    """Flash attention in half precision without a bias, else the memory-efficient kernel. Heads are padded to a
    multiple of 8 numbers."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Attended:
        width, length = query.shape[-1], query.shape[-2]
        query, key, value = (_padded(each, 8) for each in (query, key, value))
        if is_flash(query, bias):
            out, lse = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
        else:
            efficient = aten._scaled_dot_product_efficient_attention
            out, lse = efficient(query, key, value, bias, True, scale=scale)[:2]
        return Attended(out[..., :width], lse[..., :length])

    def backward(
        self,
        grad: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        whole: Attended,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = grad.shape[-1]
        grad, out, query, key, value = (_padded(each, 8) for each in (grad, whole.out, *tensors))
        unused = torch.zeros((), dtype=torch.int64, device=grad.device)  # state of the generator: nothing is dropped
        if is_flash(query, bias):
            flash = aten._scaled_dot_product_flash_attention_backward
            lengths = query.shape[-2], key.shape[-2]
            grads = flash(
                grad, query, key, value, out, whole.lse, None, None, *lengths, 0.0, False, unused, unused, scale=scale
            )
        else:
            # The kernel reads sums by 32 queries.
            lse = functional.pad(whole.lse, (0, -whole.lse.shape[-1] % 32), value=float("inf"))
            efficient = aten._scaled_dot_product_efficient_attention_backward
            wanted = [True, True, True, False]
            grads = efficient(grad, query, key, value, bias, out, lse, unused, unused, 0.0, wanted, False, scale=scale)
        of_query, of_key, of_value = (each[..., :width] for each in grads[:3])
        return of_query, of_key, of_value


def is_flash(query: Tensor, bias: Tensor | None) -> bool:
    """True if CUDA takes flash attention: half precision without a mask."""
    return bias is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= LONGEST_HEAD


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """With zeros along the last dimension; the tensor itself where it fits."""
    room = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, room)) if room else tensor


KERNELS: dict[str, BlockKernel] = {"host": CPUKernel(), "fused": FusedKernel()}
"""By `unirl.types.device_kinds.DeviceKind.block_attention`."""


def kernel_of(device: torch.device) -> BlockKernel:
    """The kernel of a device. Raises ConfigError for one without."""
    kernel = KERNELS.get(kind_of(device.type).block_attention or "")
    if kernel is None:
        raise ConfigError(no_ring(device.type))
    return kernel


def block_attention(
    kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Attended:
    """Attention to one block. mask: bool [B, H, t, u], which pairs count, or broadcast to it."""
    bias = bias_of(mask, query, key)
    out, lse = kernel.forward(query, key, value, bias, scale)
    if mask is None:
        return Attended(out, lse)
    has_key = mask.any(-1).expand(lse.shape)
    return Attended(out.masked_fill(~has_key[..., None], 0), lse.masked_fill(~has_key, float("-inf")))


def bias_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """[B, H, t, u]: 0 where a pair counts and -inf where it does not. Rows begin where fused kernels can read them."""
    if mask is None:
        return None
    *shape, length = mask.shape
    rows = torch.zeros((*shape, length + -length % 16), dtype=query.dtype, device=query.device)
    bias = rows[..., :length].masked_fill_(~mask, float("-inf"))
    return bias.expand(*query.shape[:3], key.shape[2])


def joined(one: Attended, other: Attended) -> Attended:
    """What queries found in two blocks: both are weighted by their sums."""
    share = torch.sigmoid(other.lse - one.lse).nan_to_num()  # not a number where neither has a key
    return Attended(torch.lerp(one.out, other.out, share[..., None]), torch.logaddexp(one.lse, other.lse))
