"""Images with captions as squares of one size: of Pick-a-Pic, or of the user's own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from unirl.data.datasets import read_numbered_rows
from unirl.data.media import UNREADABLE, MediaRef, upright
from unirl.datasets.hub import HubDataset
from unirl.datasets.records import Files, Picture, PublishedFile
from unirl.datasets.splitting import distinct, is_held_out
from unirl.types.errors import DataError, as_sentence

CAPTIONED = "data/train-00000-of-*.parquet"
"""The first of 645 files of pairs, about half a gigabyte."""
PAIR_COLUMNS = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
SIDE = 512
"""Pixels, as the recipes have them that read these images."""
OWN_SUFFIXES = (".jsonl", ".json", ".csv")
"""Suffixes of a user's own prompt file; `.parquet` is what is published."""
HELD_OUT = 0.1
"""Fraction of the captions."""
JPEG_QUALITY = 95


def pick_a_pic(files: str) -> HubDataset:
    """The repository of Pick-a-Pic v2, with the files of this pattern."""
    return HubDataset(name="yuvalkirstain/pickapic_v2", revision="main", license="MIT", files=(PublishedFile(files),))


def captioned_pictures(files: Files, *, held_out: bool) -> Iterator[tuple[str, Picture]]:
    """(caption, image of SIDE x SIDE) of the distinct captions of a split: the preferred image of the first pair.

    Raises DataError for a row of the user's own file without an image, or with several.
    """
    pairs = _published(files) if files.own is None else _own(files.own)
    for caption, read in distinct(pairs, lambda pair: pair[0]):
        if is_held_out(caption, HELD_OUT) == held_out:
            yield caption, read()


def _published(files: Files) -> Iterator[tuple[str, Callable[[], Picture]]]:
    for where, row in files.rows(CAPTIONED, PAIR_COLUMNS):
        name = "jpg_0" if row["label_0"] >= row["label_1"] else "jpg_1"
        yield required_text(row["caption"], where), partial(square, row[name], SIDE, f"{where}: {name}")


def _own(path: Path) -> Iterator[tuple[str, Callable[[], Picture]]]:
    for where, row in read_numbered_rows(path):
        if [(ref.modality, ref.role) for ref in row.media] != [("image", "condition")]:
            raise DataError(
                f"{where}: brings {len(row.media)} images or another role than condition; one image per row is "
                'needed, such as "images": ["cat.png"].'
            )
        yield row.prompt, partial(_square_of, row.media[0], where)


def _square_of(ref: MediaRef, where: str) -> Picture:
    place, box = ref.place()
    try:
        with Image.open(place) as opened:
            picture = upright(opened)
    except UNREADABLE as error:
        raise DataError(
            f"{where}: {ref.uri} cannot be read as an image: {as_sentence(error)} Mend or remove it."
        ) from error
    if box is not None:
        left, top, width, height = box
        picture = picture.crop((left, top, left + width, top + height))
    return _fitted(picture, SIDE)


def square(data: Any, size: int, where: str) -> Picture:  # Any: a cell of a table
    """The middle of an image, `size` x `size`; one of that size already is left as it is."""
    if not isinstance(data, bytes):
        raise DataError(f"{where} holds a {type(data).__name__}, not the bytes of an image.")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.size == (size, size) and picture.format == "JPEG":
                return Picture(data, ".jpg")
            return _fitted(picture.convert("RGB"), size)
    except UNREADABLE as error:
        raise DataError(f"{where} cannot be read as an image: {as_sentence(error)} Fetch the file again.") from error


def _fitted(picture: Image.Image, size: int) -> Picture:
    return encoded(ImageOps.fit(picture, (size, size), Image.Resampling.LANCZOS), "JPEG")


def encoded(picture: Image.Image, kind: str) -> Picture:
    """As a file of this kind, JPEG or PNG."""
    file = io.BytesIO()
    if kind == "JPEG":
        picture.save(file, kind, quality=JPEG_QUALITY)
        return Picture(file.getvalue(), ".jpg")
    picture.save(file, kind)
    return Picture(file.getvalue(), f".{kind.lower()}")


def required_text(value: Any, where: str) -> str:  # Any: a cell of a table
    """A text without white space at its ends. Raises DataError if the value is not a text."""
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {value!r} is not a text.")
    return value.strip()
