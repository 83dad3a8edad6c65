"""Image preprocessing of CLIP-like models as torch operations, so that gradients reach the pixels.

Legend: b images, C channels, H W pixels, h w pixels after resizing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from unirl.types.errors import ConfigError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Statistics of the images that OpenAI's CLIP was trained on; most models that grew from it kept them."""
_BICUBIC = 3
"""PIL's number of the filter."""


@dataclass(frozen=True)
class CropPreprocessing:
    """Shortest edge to `shortest_edge`, the middle cut out, normalised: what CLIP's image processor does on PIL.

    PIL rounds to bytes after each of the two passes of the resize, torch does not, so the result lies within 1.5 bytes
    (0.006 of the range, before the division by `std`) of the processor's.
    """

    shortest_edge: int
    crop_hw: tuple[int, int]
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD

    @classmethod
    def of(cls, processor: Any, owner: str) -> Self:  # Any: transformers' image processors share no base that says this
        """The settings of a transformers image processor. Raises ConfigError for one that does something else."""
        settings = processor.to_dict()
        size, crop = settings["size"], settings["crop_size"]
        steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
        edge = size.get("shortest_edge") or 0
        is_known = all(settings[step] for step in steps) and settings["resample"] == _BICUBIC
        if not is_known or max(crop["height"], crop["width"]) > edge:
            shown = {key: settings[key] for key in (*steps, "resample", "size", "crop_size")}
            raise ConfigError(
                f"{owner}: its image processor is not CLIP's (bicubic to the shortest edge, centre crop within it, "
                f"normalise): {shown}. Use the processor of a CLIP model."
            )
        return cls(
            shortest_edge=edge,
            crop_hw=(crop["height"], crop["width"]),
            mean=tuple(settings["image_mean"]),
            std=tuple(settings["image_std"]),
        )

    def __call__(self, pixels_bCHW: Tensor) -> Tensor:
        """Model input [b, 3, crop height, crop width] of pixels in [0, 1], with gradients, in their precision."""
        height, width = pixels_bCHW.shape[-2:]
        short = min(height, width)
        edge = self.shortest_edge
        size = (int(edge * height / short), edge) if width <= height else (edge, int(edge * width / short))
        pixels = as_pil_resizes(pixels_bCHW, size)
        top, left = (size[0] - self.crop_hw[0]) // 2, (size[1] - self.crop_hw[1]) // 2
        cropped = pixels[..., top : top + self.crop_hw[0], left : left + self.crop_hw[1]]
        return normalised(cropped, self.mean, self.std)


@dataclass(frozen=True)
class PadPreprocessing:
    """Longest edge to `side`, black around it to a square, normalised; on float pixels, not clipped after resizing."""

    side: int
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD

    def __call__(self, pixels_bCHW: Tensor) -> Tensor:
        """Model input [b, 3, side, side] of pixels in [0, 1], with gradients, in their precision."""
        height, width = pixels_bCHW.shape[-2:]
        scale = self.side / max(height, width)
        size = (round(height * scale), round(width * scale))
        pixels = resized(pixels_bCHW, size) if scale != 1 else pixels_bCHW
        below, beside = self.side - size[0], self.side - size[1]
        around = (beside // 2, beside - beside // 2, below // 2, below - below // 2)
        return normalised(nn.functional.pad(pixels, around), self.mean, self.std)


def normalised(pixels_bCHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels - mean) / std, channel by channel."""
    mean_C, std_C = pixels_bCHW.new_tensor(mean), pixels_bCHW.new_tensor(std)
    return (pixels_bCHW - mean_C[:, None, None]) / std_C[:, None, None]


def resized(pixels_bCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialiasing; may overshoot the range."""
    return nn.functional.interpolate(pixels_bCHW, size=size, mode="bicubic", antialias=True, align_corners=False)


def as_pil_resizes(pixels_bCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialiasing, across and then down, with overshoots clipped after each pass, as bytes are."""
    across = resized(pixels_bCHW, (pixels_bCHW.shape[-2], size[1])).clamp(0, 1)
    return resized(across, size).clamp(0, 1)


def at_least_float32(values: Tensor) -> Tensor:
    """float64 as it is, anything else as float32."""
    return values if values.dtype == torch.float64 else values.float()
