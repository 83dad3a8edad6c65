"""Images as pi0 sees them: resized into a square at their aspect ratio, in the middle of black, in [-1, 1]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def resized(images: Tensor, side: int) -> Tensor:
    """[n, 3, side, side] float32 in [-1, 1] of uint8 [n, 3, H, W]; what is added around is -1.

    Bilinear with antialiasing, rounded to whole values as images are. Source: openpi's resize_with_pad, by which the
    released checkpoints were trained.
    """
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    new_height, new_width = max(1, int(height * scale)), max(1, int(width * scale))
    pixels = images.float()
    if (new_height, new_width) != (height, width):
        pixels = functional.interpolate(
            pixels, (new_height, new_width), mode="bilinear", align_corners=False, antialias=True
        )
        pixels = pixels.round().clamp(0, 255)
    pixels = pixels / 127.5 - 1
    above, left = (side - new_height) // 2, (side - new_width) // 2
    around = (left, side - new_width - left, above, side - new_height - above)
    return functional.pad(pixels, around, value=-1.0) if any(around) else pixels


def padded(values: Tensor, size: int) -> Tensor:
    """[n, size] of [n, S], zeros after."""
    return torch.nn.functional.pad(values, (0, size - values.shape[1]))
