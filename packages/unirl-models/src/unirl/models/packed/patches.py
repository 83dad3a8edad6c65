"""Patches of images, and of their latents.

Legend: N patches, C channels, P pixels of a patch on a side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.models.packed.vision import Grid
from unirl.types.conditions import ImagePatchCondition


def patches_of(image: Tensor, size: int) -> Tensor:
    """[N, P P C] of an image [C, H, W], patch by patch and row by row; within a patch the channel comes last."""
    rows, columns = grid_of(image, size)
    patches = image.unflatten(1, (rows, size)).unflatten(3, (columns, size))
    return patches.permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)


def image_of(patches: Tensor, grid: Grid, size: int) -> Tensor:
    """The inverse of `patches_of`, of any number of images [B, N, P P C]: [B, C, H, W]."""
    rows, columns = grid
    cells = patches.unflatten(1, (rows, columns)).unflatten(3, (size, size, -1))
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def joined_patches(
    patches: Sequence[Tensor], grids: Sequence[Grid], places: Sequence[Sequence[int]], width: int, device: torch.device
) -> ImagePatchCondition:
    """One row per sample, of the patches [N, width] of the images at its places."""
    nothing = torch.zeros(0, width)
    return ImagePatchCondition.pack(
        patches=[torch.cat([nothing, *(patches[place].cpu() for place in sample)]) for sample in places],
        grids=[tuple((1, *grids[place]) for place in sample) for sample in places],
    ).to(device)


def grid_of(image: Tensor, size: int) -> Grid:
    """Rows and columns of patches of an image [C, H, W]."""
    return image.shape[-2] // size, image.shape[-1] // size
