"""Images and videos of a data file as tensors. Legend: B images, T frames, H W pixels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from unirl.types.errors import DataError, as_sentence
from unirl.types.preference import frame_files, split_reference, tile_corner


def read_pictures(references: Sequence[str], height: int, width: int) -> Tensor:
    """Images [B, 3, H, W], float32 in [0, 1]; transparency is dropped, grey becomes RGB.

    references: see `unirl.types.preference`. A sheet is read once. Raises DataError if an image is missing, broken or
    of another size.
    """
    files = {path: _read(path) for path in dict.fromkeys(split_reference(reference)[0] for reference in references)}
    return torch.stack([_part(files, reference, height, width) for reference in references]).float() / 255


def read_videos(references: Sequence[str], num_frames: int, height: int, width: int) -> list[Tensor]:
    """The first `num_frames` frames of each video, [T, 3, H, W], float32 in [0, 1].

    references: folders of images, or files that PyAV reads. Raises DataError if a video is missing, broken, too short
    or of another size.
    """
    return [_frames(reference, num_frames, height, width) for reference in references]


def _frames(reference: str, num_frames: int, height: int, width: int) -> Tensor:
    place = Path(reference)
    if place.is_dir():
        files = [str(file) for file in frame_files(place)]
        if len(files) >= num_frames:
            return read_pictures(files[:num_frames], height, width)
        found = len(files)
    else:
        frames = _decoded(reference, num_frames)
        found = len(frames)
        if found == num_frames and frames[0].shape[:2] != (height, width):
            raise DataError(
                f"{reference} has frames of {frames[0].shape[0]} x {frames[0].shape[1]} pixels (height x width), not "
                f"{height} x {width}. Resize it, or set sampling.height and sampling.width."
            )
        if found == num_frames:
            return torch.stack(frames).permute(0, 3, 1, 2).float() / 255
    raise DataError(f"{reference} has {found} frames, and {num_frames} are needed. Remove it, or lower num_frames.")


def _decoded(path: str, num_frames: int) -> list[Tensor]:
    """At most so many frames of a file, [H, W, 3] bytes."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{path} is a video file, which PyAV reads: pip install 'av>=14'. Or give a folder of images."
        ) from error
    try:
        with av.open(path) as container:
            frames = itertools.islice(container.decode(video=0), num_frames)
            return [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in frames]
    except (OSError, IndexError, av.FFmpegError) as error:
        raise DataError(f"{path} cannot be read as a video: {as_sentence(error)} Mend or remove it.") from error


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
