"""Where the images and sounds of prompts lie, and whether they can be read: from the heads of their files, without
torch."""

from __future__ import annotations

import io
import re
import wave
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from unirl.types.preference import frame_files

_PART = re.compile(r"(?P<path>.+)#xywh=(?:pixel:)?(?P<box>\d+,\d+,\d+,\d+)")
"""A media fragment of pixels, w3.org/TR/media-frags (section 4.2.2)."""

SLOTS = {
    ("image", "condition"): "image",
    ("image", "mask"): "mask",
    ("video", "condition"): "video",
    ("video", "mask"): "mask",
    ("video", "pose"): "pose",
    ("video", "face"): "face",
    ("video", "background"): "background",
    ("audio", "condition"): "audio",
}
"""What media are and what they are to their prompt, and the slot of a request that they become: something to look at or
to change, white where something is to be filled, a motion to follow, a scene to be put into, or something to hear."""
SAMPLE_BYTES = (1, 2, 3, 4)
"""Widths of one number in a WAV file."""
Box = tuple[int, int, int, int]
"""Left, top, width, height."""
UNREADABLE = (OSError, UnidentifiedImageError, Image.DecompressionBombError)
"""What PIL raises for files that are no images, or images of hundreds of millions of pixels."""


@dataclass(frozen=True)
class MediaRef:
    """An image that a prompt is about, a frame of a video, or a sound. `unirl.data.pictures` and `sounds` read it."""

    modality: str
    role: str
    uri: str
    """As written in the file: a path relative to the file's folder; `path#xywh=left,top,width,height` is a part."""
    folder: str = field(default="", compare=False, repr=False)
    """Where relative paths begin."""
    data: bytes | None = field(default=None, repr=False)
    """The image file itself, where the table holds it; `uri` then is its name."""

    def place(self) -> tuple[str, Box | None]:
        """Path of the file, and the part of it that is meant; None is all of it."""
        found = _PART.fullmatch(self.uri)
        path = str(Path(self.folder) / (found["path"] if found else self.uri))
        if found is None:
            return path, None
        left, top, width, height = map(int, found["box"].split(","))
        return path, (left, top, width, height)


def frames_of(ref: MediaRef) -> tuple[MediaRef, ...]:
    """The frames of a video, which is a folder of images, in the order of their names; empty where it has none."""
    folder = Path(ref.place()[0])
    files = frame_files(folder) if folder.is_dir() else []
    return tuple(replace(ref, uri=f"{ref.uri}/{file.name}") for file in files)


def picture_problem(ref: MediaRef) -> str | None:
    """What is wrong with an image, from its head alone; None where nothing is."""
    path, box = ref.place()
    size = size_of(io.BytesIO(ref.data)) if ref.data is not None else _size_of_file(path)
    if isinstance(size, str):
        return size
    return None if box is None else part_problem(box, size)


def sound_problem(ref: MediaRef) -> str | None:
    """What is wrong with a sound, from the head of its file alone; None where nothing is."""
    path = ref.place()[0]
    try:
        with wave.open(path if ref.data is None else io.BytesIO(ref.data)) as file:
            if file.getsampwidth() not in SAMPLE_BYTES:
                return f"has samples of {file.getsampwidth()} bytes; a WAV file has {SAMPLE_BYTES}"
            return None if file.getnframes() else "is empty"
    except FileNotFoundError:
        return f"does not exist ({path})"
    except (OSError, EOFError, wave.Error) as error:
        return (
            f"cannot be read as a WAV file of integer samples: {error or 'it ends too early'}. Make one, as with "
            "ffmpeg -i IN -ac 1 -ar 16000 OUT.wav"
        )


def part_problem(box: Box, size: tuple[int, int]) -> str | None:
    """Why an image of this (width, height) has no such part; None where it has."""
    left, top, width, height = box
    if width < 1 or height < 1 or left + width > size[0] or top + height > size[1]:
        return f"names a part that its image of {size[0]} x {size[1]} pixels does not have"
    return None


@cache
def _size_of_file(path: str) -> tuple[int, int] | str:
    return size_of(path)


def upright(opened: Image.Image) -> Image.Image:
    """An opened image as RGB: turned as its camera says, what is transparent on white. Raises UNREADABLE."""
    picture = ImageOps.exif_transpose(opened)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def size_of(file: str | io.BytesIO) -> tuple[int, int] | str:
    """(width, height), or why it cannot be read."""
    try:
        with Image.open(file) as picture:
            return picture.size
    except FileNotFoundError:
        return f"does not exist ({file})"
    except UNREADABLE as error:
        return f"cannot be read as an image: {error}"
