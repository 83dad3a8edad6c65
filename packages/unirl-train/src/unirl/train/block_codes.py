"""Numbers as codes: each block of K elements has a scale, its largest magnitude, and each element the place of the
nearest entry of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def quantised(values_N: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """uint8 [N], the nearest entries of `table` once each block is divided by its largest magnitude, and these float32
    [N / K]."""
    blocks = values_N.view(-1, block)
    scale = blocks.abs().amax(1).clamp_min(1e-12)
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(blocks / scale[:, None], middles, out_int32=True).to(torch.uint8).view(-1), scale


def dequantised(codes_N: Tensor, scale: Tensor, table: Tensor, block: int) -> Tensor:
    """float32 [N]."""
    return (table[codes_N.int()].view(-1, block) * scale[:, None]).view(-1)
