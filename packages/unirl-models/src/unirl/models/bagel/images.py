"""Images as BAGEL takes them: the sizes that they are resized to, and their patches.

Legend: N patches, C channels, P pixels of a patch on a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.bagel.vision import Grid
from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.extras import from_extra
from unirl.types.conditions import ImagePatchCondition

with from_extra("diffusers"):
    from PIL import Image

MOST_PIXELS = 14 * 14 * 9 * 1024
"""Largest area of a resized image. The published code multiplies a larger one's sides by the ratio of the areas."""


@dataclass(frozen=True)
class Sides:
    """Pixels on the sides of a resized image."""

    shortest: int
    longest: int
    multiple: int
    """Sides divide into it."""

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to, nearly at its aspect ratio.

        Shrunk until the longer side fits, then enlarged until the shorter one does, which wins.
        """
        scale = max(min(self.longest / max(height, width), 1.0), self.shortest / min(height, width))
        height, width = self._rounded(height, width, scale)
        if height * width > MOST_PIXELS:
            height, width = self._rounded(height, width, MOST_PIXELS / (height * width))
        if max(height, width) > self.longest:
            height, width = self._rounded(height, width, self.longest / max(height, width))
        return height, width

    def _rounded(self, height: int, width: int, scale: float) -> tuple[int, int]:
        multiple = self.multiple
        sides = (max(multiple, round(round(side * scale) / multiple) * multiple) for side in (height, width))
        return next(sides), next(sides)

    def resized(self, picture: Tensor) -> Tensor:
        """An image [3, H, W] in [0, 1] by Pillow's bicubic filter in 8 bits."""
        height, width = self.of(*picture.shape[-2:])
        small = as_pil(picture).resize((width, height), Image.Resampling.BICUBIC)
        return (
            torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)
            / 255
        )


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
