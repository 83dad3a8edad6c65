"""Images as the vision tower of a Qwen-VL takes them. Legend: N patches, D numbers of a patch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, DataError

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


def vision_patches(image_processor: Any, picture: Tensor) -> tuple[Tensor, Grid]:  # Any: classes of transformers
    """Patches [N, D] and grid of an image [3, H, W] in [0, 1], rounded to 8 bits first.

    Raises DataError for an image of other channels, or that cannot be resized.
    """
    if picture.shape[0] != 3:
        raise DataError(f"an image has {picture.shape[0]} channels; Qwen-VL reads RGB images [3, H, W]")
    pixels = (picture.clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy()
    try:
        out = image_processor(images=[pixels], return_tensors="pt", input_data_format="channels_first")
    except ValueError as error:
        height, width = pixels.shape[1:]
        raise DataError(f"an image of {width} x {height} pixels cannot be resized: {error}") from error
    frames, rows, columns = (int(size) for size in out["image_grid_thw"][0])
    return out["pixel_values"], (frames, rows, columns)


def expanded(tokens: list[int], grids: tuple[Grid, ...], placeholder: int, patches_per_token: int) -> list[int]:
    """Every placeholder as often as its image has tokens. Raises ConfigError if there is not one per image."""
    if tokens.count(placeholder) != len(grids):
        raise ConfigError(
            f"a prompt with {len(grids)} images has {tokens.count(placeholder)} image placeholders. Remove them from "
            "its text, or correct the chat template."
        )
    sizes = iter([t * h * w // patches_per_token for t, h, w in grids])
    return [copy for token in tokens for copy in ([token] * next(sizes) if token == placeholder else [token])]
