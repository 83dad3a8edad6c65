"""Images with something to be done to them: instructions that change them, and motion that begins with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from unirl.datasets.hub import HubDataset
from unirl.datasets.motion import CAMERAS
from unirl.datasets.records import IMAGE, Files, Picture, PromptSet, PublishedFile, Row, both_splits
from unirl.datasets.splitting import is_held_out, several_drawn
from unirl.types.errors import DataError

TABLES = "data/*.parquet"
LANGUAGE = "en"
HELD_OUT = 0.15
"""Fraction of the images: one image has several instructions."""
MOTIONS_PER_PICTURE = 3
REPOSITORY = HubDataset(
    name="stepfun-ai/GEdit-Bench",
    revision="main",
    license="see the repository",
    files=(PublishedFile(TABLES),),
)


def _asked(files: Files, *, held_out: bool) -> Iterator[tuple[Picture, str, str]]:
    """(image, instruction, kind of instruction) of every row in English."""
    columns = ("task_type", "instruction", "instruction_language", "input_image_raw")
    for where, row in files.rows(TABLES, columns):
        if row["instruction_language"] != LANGUAGE:
            continue
        if not isinstance(row["instruction"], str) or not row["instruction"].strip():
            raise DataError(f"{where}: instruction = {row['instruction']!r} is not a text.")
        picture = _picture(row["input_image_raw"], where)
        if is_held_out(_digest(picture), HELD_OUT) == held_out:
            yield picture, row["instruction"].strip(), str(row["task_type"])


def _edits(files: Files, *, held_out: bool) -> Iterator[Row]:
    seen: set[tuple[str, str]] = set()
    for picture, instruction, kind in _asked(files, held_out=held_out):
        key = (_digest(picture), instruction)
        if key not in seen:
            seen.add(key)
            yield {"prompt": instruction, "images": [picture], "category": kind}


def _motions(files: Files, *, held_out: bool) -> Iterator[Row]:
    """Each image once for each of some motions of the camera."""
    seen: set[str] = set()
    for picture, _, _ in _asked(files, held_out=held_out):
        digest = _digest(picture)
        if digest in seen:
            continue
        seen.add(digest)
        for camera in several_drawn(CAMERAS, MOTIONS_PER_PICTURE, f"picture motion {digest}"):
            prompt = f"The scene comes to life with natural motion, {CAMERAS[camera]}"
            yield {"prompt": prompt, "images": [picture], "category": camera}


def _picture(cell: Any, where: str) -> Picture:  # Any: a cell of a table
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not data:
        raise DataError(f"{where}: input_image_raw holds no image. Fetch the file again.")
    return Picture(data, ".png")


def _digest(picture: Picture) -> str:
    return hashlib.sha256(picture.data).hexdigest()


IMAGE_EDIT = PromptSet(
    name="image_edit",
    what="an image and an instruction that changes it",
    made="instructions in English with their images, in a table; 15% of the images held out by hash",
    media=(IMAGE,),
    sources=(REPOSITORY,),
    outputs=both_splits(_edits, suffix=".parquet", reads=(TABLES,)),
)
PICTURE_MOTION = PromptSet(
    name="picture_motion",
    what="an image that a video begins with, and a motion of the camera",
    made=f"the images of image_edit, each with {MOTIONS_PER_PICTURE} motions by hash; 15% of the images held out",
    media=(IMAGE,),
    sources=(REPOSITORY,),
    outputs=both_splits(_motions, suffix=".parquet", reads=(TABLES,)),
)
