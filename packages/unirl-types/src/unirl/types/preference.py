"""Data rows that bring their own images: what preference data is made of, instead of samples of the policy.

The metadata of such a row has `images`, two or more references, and `scores`, a number each (higher is better).
Sample j of the row's group takes image j. A reference is the path of an image file, or `path#k`: tile k, counted row
by row, of a sheet whose tiles have the size of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.types.errors import ContractError

IMAGES = "images"
SCORES = "scores"
SAMPLE_MARK = ":sample:"
"""Between the group and the place of a sample in its id."""

Metadata = Mapping[str, Any] | None  # Any: JSON values of a user's data file


def sample_place(sample_id: str) -> int:
    """j of the id `{group}:sample:{j}`. Raises ContractError for an id of another form."""
    _, mark, place = sample_id.rpartition(SAMPLE_MARK)
    if not mark or not place.isdecimal():
        raise ContractError(f"sample id {sample_id!r} does not end with {SAMPLE_MARK}<place in its group>")
    return int(place)


def given_image(metadata: Metadata, sample_id: str) -> str | None:
    """The reference of the image that the row gives to this sample; None where the row has no images.

    Raises ContractError if it has too few.
    """
    return _given(metadata, IMAGES, sample_id)


def given_score(metadata: Metadata, sample_id: str) -> float | None:
    """The score that the row gives to this sample; None where the row has no scores. Raises as `given_image`."""
    return _given(metadata, SCORES, sample_id)


def split_reference(reference: str) -> tuple[str, int | None]:
    """Path of the image file, and the tile of a sheet or None for the whole image."""
    path, mark, tile = reference.rpartition("#")
    return (path, int(tile)) if mark and path and tile.isdecimal() else (reference, None)


def frame_files(folder: Path) -> list[Path]:
    """The frames of a video that is a folder of images, in the order of their names."""
    return sorted(file for file in folder.iterdir() if file.is_file())


def tile_corner(sheet: tuple[int, int], size: tuple[int, int], tile: int) -> tuple[int, int] | None:
    """Top and left pixel of a tile; None where the sheet does not divide into tiles, or has no such tile.

    sheet, size: (height, width) of the sheet and of a tile.
    """
    rows, columns = sheet[0] // size[0], sheet[1] // size[1]
    if sheet[0] % size[0] or sheet[1] % size[1] or tile >= rows * columns:
        return None
    return tile // columns * size[0], tile % columns * size[1]


def _given(metadata: Metadata, key: str, sample_id: str) -> Any | None:  # Any: a value of the file
    values: Sequence[Any] | None = None if metadata is None else metadata.get(key)
    if values is None:
        return None
    place = sample_place(sample_id)
    if place >= len(values):
        raise ContractError(
            f"sample {sample_id} has no entry in its row's {key}, which are {len(values)}. "
            "Lower sampling.samples_per_prompt."
        )
    return values[place]
