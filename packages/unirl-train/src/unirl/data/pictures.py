"""The images of prompt rows, as tensors. Legend: H W pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor

from unirl.data.media import UNREADABLE, MediaRef, part_problem, upright
from unirl.types.errors import DataError, as_sentence
from unirl.types.media import ImageLists

_KEPT_FILES = 8
"""Decoded files that stay in memory: a sheet of many small images is decoded once."""


def prompt_pictures(prompts: Sequence[Sequence[MediaRef]]) -> ImageLists:
    """The images of each prompt, in its order, with where they come from.

    Raises DataError for an image that is missing or broken.
    """
    return ImageLists(
        images=[[read_picture(ref) for ref in refs] for refs in prompts],
        sources=[tuple(ref.uri for ref in refs) for refs in prompts],
    )


def read_picture(ref: MediaRef) -> Tensor:
    """[3, H, W] float32 in [0, 1]: upright, grey as RGB, what is transparent on white. Raises DataError."""
    path, box = ref.place()
    pixels = _decoded_file(path) if ref.data is None else _decoded(io.BytesIO(ref.data), ref.uri)
    if box is not None:
        problem = part_problem(box, (pixels.shape[2], pixels.shape[1]))
        if problem is not None:
            raise DataError(f"{ref.uri} {problem}. Mend it or remove the row.")
        left, top, width, height = box
        pixels = pixels[:, top : top + height, left : left + width]
    return pixels.float() / 255


@lru_cache(maxsize=_KEPT_FILES)
def _decoded_file(path: str) -> Tensor:
    return _decoded(path, path)


def _decoded(file: str | io.BytesIO, name: str) -> Tensor:
    """[3, H, W] uint8."""
    try:
        with Image.open(file) as opened:
            rgb = upright(opened)
    except FileNotFoundError as error:
        raise DataError(f"the image {name} does not exist. Mend its path or remove the row.") from error
    except UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {as_sentence(error)} Mend or remove it.") from error
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, 3).permute(2, 0, 1)
