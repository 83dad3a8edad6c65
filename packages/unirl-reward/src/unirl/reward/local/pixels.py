"""From float pixels to the bytes that image processors and JPEG see.

Legend: b images, C channels, H W pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unirl.types.errors import ContractError

RANGE_TOLERANCE = 0.01
"""Overshoot that is clipped. Resampling and low precision leave [0, 1] by less, pixels in [-1, 1] by more."""


def check_pixels(pixels_bCHW: Tensor) -> None:
    """Raises ContractError for pixels that are not 3 channels of floats in [0, 1]."""
    if pixels_bCHW.ndim != 4 or pixels_bCHW.shape[1] != 3 or not pixels_bCHW.is_floating_point():
        raise ContractError(f"images must be float [b, 3, H, W], got {pixels_bCHW.dtype} {tuple(pixels_bCHW.shape)}")
    low, high = pixels_bCHW.min().item(), pixels_bCHW.max().item()
    if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
        raise ContractError(f"pixels must lie in [0, 1], got {low:.4g} to {high:.4g}; decode to [0, 1] first")


def to_bytes(pixels_bCHW: Tensor) -> np.ndarray:
    """uint8 [b, H, W, 3], round(255 * pixel): what saving the image as PNG would keep.

    Raises ContractError as `check_pixels` does.
    """
    check_pixels(pixels_bCHW)
    scaled = (pixels_bCHW.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).cpu().numpy()


def to_pictures(pixels_bCHW: Tensor) -> list[Image.Image]:
    """RGB images of `to_bytes`."""
    return [Image.fromarray(picture) for picture in to_bytes(pixels_bCHW)]
