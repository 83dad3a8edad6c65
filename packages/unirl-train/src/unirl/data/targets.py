"""Data of supervised fine-tuning of image and video models: prompts with what the model is to make of them.

A row is `{"prompt": ..., "target": ...}`. An image is a file, or `sheet.png#k`, see `unirl.types.preference`; a video
is a file that PyAV reads, or a folder of images, its frames in the order of their names. Paths are relative to the
folder of the data file. A row may have images of its prompt as well, as rows of editors have. Of a row of preferences
(`unirl.data.pairs`) the image with the highest score is the target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import PromptRow, read_numbered_rows
from unirl.data.pairs import image_problem
from unirl.types.errors import DataError
from unirl.types.preference import IMAGES, SCORES, frame_files

TARGET = "target"


class TargetDataSource(MultimodalRLDataSource):
    """Rows of a file of targets, in the order of `MultimodalRLDataSource`.

    path: a file or dataset folder, see `unirl.data.datasets`. Raises DataError naming file and line for a row whose
    target is missing or cannot be read.
    """

    brings_images: ClassVar[bool] = True
    brings_targets: ClassVar[bool] = True

    def __init__(self, path: str, seed: int = 0, shuffle: bool = True, split: str | None = None) -> None:
        super().__init__(path, seed, shuffle, split)
        # The fingerprint is of the file's own content: absolute paths would tie a checkpoint to one machine.
        self.rows = read_targets(path, split)


def read_targets(
    path: str | Path, split: str | None = None, *, size: tuple[int, int] | None = None, num_frames: int | None = None
) -> list[PromptRow]:
    """Rows whose `metadata["images"]` is the absolute reference of their target alone.

    size: (height, width) that images and folders of frames must have; None leaves it to the engine. num_frames: of the
    videos that the model makes, 1 for images; None leaves it to the engine, too. Raises DataError naming file, line and
    what to change.
    """
    path = Path(path).expanduser()
    return [
        _checked(row, where, path.absolute().parent, size, num_frames) for where, row in read_numbered_rows(path, split)
    ]


def _checked(
    row: PromptRow, where: str, folder: Path, size: tuple[int, int] | None, num_frames: int | None
) -> PromptRow:
    target = row.metadata.get(TARGET, _preferred(row))
    if not isinstance(target, str) or not target:
        raise DataError(f"{where}: {TARGET} = {target!r} must be the file of what the model is to make.")
    place = folder / target
    if num_frames == 1:
        problem = image_problem(str(place), size)
    else:
        problem = _video_problem(place, size, num_frames)
    if problem is not None:
        raise DataError(f"{where}: {TARGET} {target} {problem}")
    return replace(row, metadata={**row.metadata, IMAGES: [str(place)]})


def _preferred(row: PromptRow) -> str | None:
    """The best image of a row of preferences, None for another one."""
    images, scores = row.metadata.get(IMAGES), row.metadata.get(SCORES)
    if not isinstance(images, list) or not isinstance(scores, list) or len(images) != len(scores) or not images:
        return None
    return images[max(range(len(scores)), key=scores.__getitem__)]


def _video_problem(place: Path, size: tuple[int, int] | None, num_frames: int | None) -> str | None:
    """What is wrong with a video as far as its folder tells, None where nothing is."""
    if not place.is_dir():
        return None if place.exists() or num_frames is None else f"does not exist ({place})."
    frames = frame_files(place)
    if num_frames is not None and len(frames) < num_frames:
        return f"has {len(frames)} frames, sampling.num_frames = {num_frames}. Leave it out, or set this."
    return next((found for file in frames[:num_frames] if (found := image_problem(str(file), size)) is not None), None)
