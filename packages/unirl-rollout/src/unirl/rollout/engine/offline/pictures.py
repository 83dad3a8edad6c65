"""Images of a data file as tensors. Legend: B images, H W pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from unirl.types.errors import DataError, as_sentence
from unirl.types.preference import split_reference, tile_corner


def read_pictures(references: Sequence[str], height: int, width: int) -> Tensor:
    """Images [B, 3, H, W], float32 in [0, 1]; transparency is dropped, grey becomes RGB.

    references: see `unirl.types.preference`. A sheet is read once. Raises DataError if an image is missing, broken or
    of another size.
    """
    files = {path: _read(path) for path in dict.fromkeys(split_reference(reference)[0] for reference in references)}
    return torch.stack([_part(files, reference, height, width) for reference in references]).float() / 255


def _read(path: str) -> Tensor:
    try:
        with Image.open(path) as picture:
            rgb = picture.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} cannot be read as an image: {as_sentence(error)} Mend or remove it.") from error
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def _part(files: dict[str, Tensor], reference: str, height: int, width: int) -> Tensor:
    path, tile = split_reference(reference)
    picture = files[path]
    found = (picture.shape[1], picture.shape[2])
    corner = (0, 0) if tile is None and found == (height, width) else None
    if tile is not None:
        corner = tile_corner(found, (height, width), tile)
    if corner is None:
        raise DataError(
            f"{reference} does not give an image of {height} x {width} pixels (height x width): the file has "
            f"{found[0]} x {found[1]}. Resize it, or set sampling.height and sampling.width."
        )
    top, left = corner
    return picture[:, top : top + height, left : left + width]
