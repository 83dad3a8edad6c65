"""Preference data: prompts with their own images and which of them is better.

A row is `{"prompt": ..., "images": [chosen, rejected], "scores": [1, 0]}`, see `unirl.types.preference`. Paths are
relative to the folder of the data file.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from PIL import Image, UnidentifiedImageError

from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import PromptRow, read_numbered_rows
from unirl.types.errors import DataError, as_sentence
from unirl.types.preference import IMAGES, SCORES, split_reference, tile_corner


class PreferenceDataSource(MultimodalRLDataSource):
    """Rows of a file of preferences, in the order of `MultimodalRLDataSource`.

    path: a file or dataset folder, see `unirl.data.datasets`. Raises DataError naming file and line for a row without
    two images, with an image that is missing, or whose scores are all equal.
    """

    brings_images: ClassVar[bool] = True

    def __init__(self, path: str, seed: int = 0, shuffle: bool = True, split: str | None = None) -> None:
        super().__init__(path, seed, shuffle, split)
        # The fingerprint is of the file's own content: absolute paths would tie a checkpoint to one machine.
        self.rows = read_pairs(path, split)


def read_pairs(
    path: str | Path, split: str | None = None, *, size: tuple[int, int] | None = None, num_images: int = 2
) -> list[PromptRow]:
    """Rows with absolute references in `metadata["images"]`.

    size: (height, width) that every image must have; None leaves sizes to the engine. num_images: how many of a row's
    images are used; their scores must not all be equal. Raises DataError naming file, line and what to change.
    """
    path = Path(path).expanduser()
    return [
        _checked(row, where, path.absolute().parent, size, num_images) for where, row in read_numbered_rows(path, split)
    ]


def _checked(row: PromptRow, where: str, folder: Path, size: tuple[int, int] | None, num_images: int) -> PromptRow:
    images, scores = row.metadata.get(IMAGES), row.metadata.get(SCORES)
    if not isinstance(images, list) or not all(isinstance(item, str) and item for item in images):
        raise DataError(f"{where}: {IMAGES} = {images!r} must be a list of image files.")
    if len(images) < num_images:
        raise DataError(
            f"{where}: {len(images)} images, but {num_images} samples per prompt. Give at least {num_images}."
        )
    if not _are_numbers(scores) or len(scores) != len(images):
        raise DataError(
            f"{where}: {SCORES} = {scores!r} must be a list of {len(images)} finite numbers, one per image."
        )
    if len(set(scores[:num_images])) == 1:
        raise DataError(
            f"{where}: the scores {scores[:num_images]} are equal, so neither image is preferred. Remove the row."
        )
    references = [str(folder / item) for item in images]
    for item, reference in zip(images, references, strict=True):
        problem = image_problem(reference, size)
        if problem is not None:
            raise DataError(f"{where}: image {item} {problem}")
    return replace(row, metadata={**row.metadata, IMAGES: references})


def _are_numbers(values: Any) -> TypeGuard[list[float]]:  # Any: a JSON value
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def image_problem(reference: str, size: tuple[int, int] | None) -> str | None:
    """What is wrong with an image, None where nothing is. size: see `read_pairs`."""
    path, tile = split_reference(reference)
    found = _picture_size(path)
    if isinstance(found, str):
        return found
    if size is None:
        return None
    height, width = size
    if tile is None and found != size:
        return (
            f"has {found[0]} x {found[1]} pixels (height x width), sampling.height x sampling.width = "
            f"{height} x {width}. Resize it, or set these."
        )
    if tile is not None and tile_corner(found, size, tile) is None:
        return f"names tile {tile} of a sheet of {found[0]} x {found[1]} pixels, which has none of {height} x {width}."
    return None


@cache
def _picture_size(path: str) -> tuple[int, int] | str:
    """(height, width) from the file's head, or why it cannot be read."""
    try:
        with Image.open(path) as picture:
            return picture.height, picture.width
    except FileNotFoundError:
        return f"does not exist ({path})."
    except (OSError, UnidentifiedImageError) as error:
        return f"cannot be read as an image: {as_sentence(error)}"
