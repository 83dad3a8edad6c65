"""Sheets: one image file of many drawings of the shapes world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from unirl.worlds.shapes.world import IMAGE_SIDE

LEVELS = 16
"""Values of a colour channel that a sheet keeps: enough for antialiased edges, at a quarter of the bytes."""


def coarse(picture: np.ndarray) -> np.ndarray:
    """A drawing uint8 [3, 32, 32] with LEVELS values per channel, which a sheet holds without loss."""
    step = 255 / (LEVELS - 1)
    return np.round(np.round(picture / step) * step).astype(np.uint8)


def write_sheet(path: Path, pictures: Sequence[np.ndarray], columns: int) -> None:
    """Write coarse drawings as tiles, `columns` in a row and rows of black tiles at the end, so that the sheet's
    rows divide evenly."""
    rows = -(-len(pictures) // columns)
    tiles = np.zeros((rows * columns, 3, IMAGE_SIDE, IMAGE_SIDE), dtype=np.uint8)
    tiles[: len(pictures)] = np.stack(pictures)
    sheet = tiles.reshape(rows, columns, 3, IMAGE_SIDE, IMAGE_SIDE).transpose(0, 3, 1, 4, 2)
    picture = Image.fromarray(sheet.reshape(rows * IMAGE_SIDE, columns * IMAGE_SIDE, 3))
    # Four hues in LEVELS values each fit a palette without loss.
    picture.quantize(4 * LEVELS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)


def tile_uri(name: str, tile: int, columns: int) -> str:
    """Where a tile lies in its sheet, as a media fragment (w3.org/TR/media-frags): `name#xywh=left,top,32,32`."""
    left, top = tile % columns * IMAGE_SIDE, tile // columns * IMAGE_SIDE
    return f"{name}#xywh={left},{top},{IMAGE_SIDE},{IMAGE_SIDE}"
