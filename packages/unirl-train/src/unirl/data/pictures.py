"""The pictures of prompt rows, as tensors. Legend: H W pixels."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from unirl.types.errors import DataError
from unirl.types.media import ImageLists

_PART = re.compile(r"(?P<path>.+)#xywh=(?:pixel:)?(?P<box>\d+,\d+,\d+,\d+)")
"""A media fragment of pixels, w3.org/TR/media-frags (section 4.2.2)."""
_KEPT_FILES = 8
"""Decoded files that stay in memory: a sheet of many small pictures is decoded once."""

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class MediaRef:
    """A picture that a prompt is about. `unirl.data.pictures` reads it."""

    modality: str
    role: str
    uri: str
    """As written in the file: a path relative to the file's folder; `path#xywh=left,top,width,height` is a part."""
    folder: str = field(default="", compare=False, repr=False)
    """Where relative paths begin."""
    data: bytes | None = field(default=None, repr=False)
    """The picture file itself, where the table holds it; `uri` then is its name."""


def prompt_pictures(prompts: Sequence[Sequence[MediaRef]]) -> ImageLists:
    """The pictures of each prompt, in its order, with where they come from.

    Raises DataError for a picture that is missing or broken.
    """
    return ImageLists(
        images=[[read_picture(ref) for ref in refs] for refs in prompts],
        sources=[tuple(ref.uri for ref in refs) for refs in prompts],
    )


def read_picture(ref: MediaRef) -> Tensor:
    """[3, H, W] float32 in [0, 1]: upright, grey as RGB, what is transparent on white. Raises DataError."""
    path, box = _place(ref)
    pixels = _decoded(_stored(ref, path), ref.uri) if ref.data is not None else _decoded_file(path)
    if box is not None:
        left, top, width, height = _checked_box(ref, box, (pixels.shape[2], pixels.shape[1]))
        pixels = pixels[:, top : top + height, left : left + width]
    return pixels.float() / 255


def picture_problem(ref: MediaRef) -> str | None:
    """What is wrong with a picture, from its head alone; None where nothing is."""
    path, box = _place(ref)
    size = _size_of(_stored(ref, path)) if ref.data is not None else _size_of_file(path)
    if isinstance(size, str):
        return size
    try:
        if box is not None:
            _checked_box(ref, box, size)
    except DataError as error:
        return str(error)
    return None


def _place(ref: MediaRef) -> tuple[str, Box | None]:
    found = _PART.fullmatch(ref.uri)
    path = str(Path(ref.folder) / (found["path"] if found else ref.uri))
    if found is None:
        return path, None
    left, top, width, height = map(int, found["box"].split(","))
    return path, (left, top, width, height)


def _stored(ref: MediaRef, path: str) -> io.BytesIO:
    return io.BytesIO(ref.data if ref.data is not None else Path(path).read_bytes())


def _checked_box(ref: MediaRef, box: Box, size: tuple[int, int]) -> Box:
    left, top, width, height = box
    if width < 1 or height < 1 or left + width > size[0] or top + height > size[1]:
        raise DataError(f"{ref.uri} names a part that its picture of {size[0]} x {size[1]} pixels does not have")
    return box


@lru_cache(maxsize=_KEPT_FILES)
def _decoded_file(path: str) -> Tensor:
    return _decoded(path, path)


def _decoded(file: str | io.BytesIO, name: str) -> Tensor:
    """[3, H, W] uint8."""
    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            rgb = picture.convert("RGB")
    except FileNotFoundError as error:
        raise DataError(f"the picture {name} does not exist. Mend its path or remove the row.") from error
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read as a picture: {error}. Mend or remove it.") from error
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


@cache
def _size_of_file(path: str) -> tuple[int, int] | str:
    return _size_of(path)


def _size_of(file: str | io.BytesIO) -> tuple[int, int] | str:
    """(width, height), or why it cannot be read."""
    try:
        with Image.open(file) as picture:
            return picture.size
    except FileNotFoundError:
        return f"does not exist ({file})"
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        return f"cannot be read as a picture: {error}"
