"""Images as BAGEL takes them: the sizes that they are resized to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.models.diffusers_pipeline.references import filtered
from unirl.models.extras import from_extra

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
        return filtered(picture, *self.of(*picture.shape[-2:]), Image.Resampling.BICUBIC)
