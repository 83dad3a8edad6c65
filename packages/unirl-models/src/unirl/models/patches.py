"""Latents in patches, as transformers that pack them take their tokens. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor


def patched(latents: Tensor, patch: int) -> Tensor:
    """[B, C, h, w] to tokens [B, (h / patch) (w / patch), patch^2 C] for a patch of 1 or 2."""
    return packed_2x2(latents) if patch == 2 else latents.flatten(2).mT


def places(*sizes: int, device: torch.device, first: int = 0) -> Tensor:
    """Coordinates [product of sizes, number of axes] of tokens in the order of their axes, the last one fastest.

    first: where the first axis begins, to tell one image from another.
    """
    axes = [torch.arange(size, device=device) for size in sizes]
    return torch.cartesian_prod(axes[0] + first, *axes[1:])


def packed_2x2(latents: Tensor) -> Tensor:
    """[B, C, h, w] to tokens [B, (h / 2) (w / 2), 4 C], row by row; within a token the channel comes first."""
    channels, height, width = latents.shape[1:]
    patches = latents.unflatten(2, (height // 2, 2)).unflatten(4, (width // 2, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(len(latents), -1, 4 * channels)


def unpacked_2x2(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `packed_2x2`: [B, C, height, width]."""
    patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)
