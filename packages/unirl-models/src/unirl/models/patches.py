"""Latents in patches, as transformers that pack them take their tokens. Shape letters: see `unirl.models`."""

from __future__ import annotations

from torch import Tensor


def packed_2x2(latents: Tensor) -> Tensor:
    """[B, C, h, w] to tokens [B, (h / 2) (w / 2), 4 C], row by row; within a token the channel comes first."""
    channels, height, width = latents.shape[1:]
    patches = latents.unflatten(2, (height // 2, 2)).unflatten(4, (width // 2, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(len(latents), -1, 4 * channels)


def unpacked_2x2(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `packed_2x2`: [B, C, height, width]."""
    patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)
