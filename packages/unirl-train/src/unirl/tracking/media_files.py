"""Media of sample records as files that other programs open: PNG or WebP, MP4 or GIF, WAV; and read back.

What JSON says of a medium is in docs/reference/run_directory.md. Legend: C channels, H W pixels, L waveform samples.
"""

from __future__ import annotations

import hashlib
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image as PillowImage
from torch import Tensor

from unirl.tracking.video import read_video, write_video
from unirl.types.errors import DataError
from unirl.types.samples import Image, Medium, Sound, Text, Unshown, Video

ImageFormat = Literal["png", "webp"]
Description = dict[str, Any]  # Any: JSON values
_DEFAULT_RATE = 16_000
"""Hertz of waveforms whose model gives no rate."""
_PCM = 32767
"""Largest number of a 16-bit WAV file."""
_OPTIONS: dict[ImageFormat, dict[str, Any]] = {"png": {"compress_level": 1}, "webp": {"quality": 90}}
"""Options of Pillow (Any: by format). A higher level of PNG takes five times as long for a tenth fewer bytes."""


def write_medium(medium: Medium, folder: Path, stem: str, image_format: ImageFormat = "png") -> Description:
    """Write a medium as `stem` with its own ending into `folder`; returns what JSON says of it, with its file's path
    from the folder above. A text is in the JSON itself. Raises OSError."""
    above = folder.parent
    match medium:
        case Image():
            file = folder / f"{stem}.{image_format}"
            pillow(medium.pixels).save(file, **_OPTIONS[image_format])
            height, width = medium.pixels.shape[-2:]
            described = {"kind": "image", "file": _from(above, file), "height": height, "width": width}
            return described if medium.source is None else {**described, "source": medium.source}
        case Video():
            file = write_video(folder, stem, medium.frames, medium.fps, medium.sound)
            height, width = medium.frames.shape[-2:]
            sound = None if medium.sound is None else write_medium(medium.sound, folder, f"{stem}-sound")
            return {
                "kind": "video",
                "file": _from(above, file),
                "num_frames": medium.num_frames,
                "fps": medium.fps,
                "height": height,
                "width": width,
                "sound": sound,
            }
        case Sound():
            file = folder / f"{stem}.wav"
            _write_wav(file, medium)
            return {"kind": "sound", "file": _from(above, file), "rate": medium.rate, "length": len(medium.waveform)}
        case Text():
            return {"kind": "text", "text": medium.text, "num_tokens": medium.num_tokens}
        case Unshown():
            return {"kind": "unshown", "type": medium.kind}


def read_medium(described: Description, above: Path) -> Medium:
    """The medium that JSON describes; `above` is the folder that its path starts from. Raises DataError."""
    match described["kind"]:
        case "text":
            return Text(described["text"], described["num_tokens"])
        case "unshown":
            return Unshown(described["type"])
        case "image":
            with PillowImage.open(above / described["file"]) as file:
                pixels = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1).contiguous()
            return Image(pixels, described.get("source"))
        case "video":
            frames = read_video(above / described["file"])
            sound = None if described["sound"] is None else read_medium(described["sound"], above)
            assert sound is None or isinstance(sound, Sound)  # noqa: S101 - written so
            return Video(frames, described["fps"], described["num_frames"], sound)
        case "sound":
            return replace(read_wav(above / described["file"]), rate=described["rate"])
        case other:
            raise DataError(f"media of kind {other!r} are unknown here; read them with the version that wrote them.")


def pillow(pixels: Tensor) -> PillowImage.Image:
    """uint8 [C, H, W] with one or three channels as an RGB image."""
    return PillowImage.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy(), "RGB")


def digest(medium: Medium) -> str:
    """Equal for equal media, and no more than a part of a file's name."""
    match medium:
        case Image():
            said = repr(medium.source).encode() + medium.pixels.contiguous().numpy().tobytes()
        case Sound():
            said = repr(medium.rate).encode() + medium.waveform.contiguous().numpy().tobytes()
        case Video():
            said = repr(medium.fps).encode() + medium.frames.contiguous().numpy().tobytes()
        case other:
            said = repr(other).encode()
    return hashlib.blake2b(said, digest_size=6).hexdigest()


def _from(above: Path, file: Path) -> str:
    return file.relative_to(above).as_posix()


def _write_wav(file: Path, sound: Sound) -> None:
    numbers = (sound.waveform.float().clamp(-1, 1) * _PCM).round().short().contiguous()
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1 if numbers.ndim == 1 else numbers.shape[1])
        out.setsampwidth(2)
        out.setframerate(_DEFAULT_RATE if sound.rate is None else sound.rate)
        out.writeframes(numbers.numpy().astype("<i2").tobytes())


def read_wav(file: Path) -> Sound:
    """The sound of a WAV file of 16 bits."""
    with wave.open(str(file), "rb") as read:
        channels, rate = read.getnchannels(), read.getframerate()
        numbers = np.frombuffer(read.readframes(read.getnframes()), dtype="<i2").astype(np.float32) / _PCM
    waveform = torch.from_numpy(numbers)
    return Sound(waveform if channels == 1 else waveform.view(-1, channels), rate)
