"""Latents as the tokens that some transformers take. p: latent pixels on a side of a token."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def as_tokens(latents: Tensor, side: int) -> Tensor:
    """[B, C, h, w] to [B, (h / p) (w / p), C p p], row by row; within a token the channel comes first."""
    return pixel_unshuffle(latents, side).flatten(2).mT


def from_tokens(tokens: Tensor, side: int, height: int, width: int) -> Tensor:
    """The inverse: [..., L, C p p] to [..., C, height, width]."""
    return pixel_shuffle(tokens.mT.unflatten(-1, (height // side, width // side)), side)
