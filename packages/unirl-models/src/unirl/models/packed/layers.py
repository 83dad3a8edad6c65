"""Layers of decoders over packed rows.

Legend: N tokens of all rows, G heads of keys and values, D width of a head, K experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Outputs(NamedTuple):
    """What a forward of a decoder was asked for; the rest is None."""

    images: Tensor | None
    """[n, width], of the images that are made."""
    logits: Tensor | tuple[Tensor, Tensor, Tensor] | None
    """[1, n, vocabulary], or what `unirl.models.token_scores.ScoringHead` gives in their place."""
    layers: list[tuple[Tensor, Tensor]] | None
    """Per block the keys and values [N, G, D]."""
    routes: list[Tensor] | None = None
    """Per block of experts those that tokens went to, int64 [N, K]."""
