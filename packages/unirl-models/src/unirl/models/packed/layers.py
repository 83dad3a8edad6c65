"""Layers of decoders over packed rows.

Legend: N tokens of all rows, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines [N, 1, D / 2], float32."""


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, the norm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width], of the dtype of x."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [N, heads, D] with its halves as the coordinates that turn (the convention of GPT-NeoX)."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
