"""Images, videos and compressed sounds inside JSON: base64 of files, decoded within limits.

Legend: T frames, H W pixels, L samples of a waveform, C channels.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import io
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pybase64
from PIL import Image, ImageSequence

from unirl.reward.wire.samples import Limits
from unirl.types.errors import DataError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
ANIMATED_FORMATS = ("PNG", "GIF", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""8 bits per channel or less. Deeper images would be clipped by the conversion to RGB."""

# What Pillow raises for malformed files, by its own test-suite and by fuzzing.
_DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error, zlib.error)


class Budget:
    """Counts the decoded bytes of one body against `Limits.max_media_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = 0

    def take(self, num_bytes: int, where: str) -> None:
        """Raises DataError if the media of the body would become too large."""
        self.used += num_bytes
        if self.used > self.limits.max_media_bytes:
            raise DataError(
                f"{where}: the media of this request take more than max_media_bytes = {self.limits.max_media_bytes} "
                "when decoded; send fewer samples at a time"
            )


def check_size(width: int, height: int, where: str, limits: Limits) -> None:
    """Raises DataError for an image without pixels or with too many."""
    if width < 1 or height < 1 or width * height > limits.max_pixels:
        raise DataError(f"{where} is {width} x {height}; it must have 1 to {limits.max_pixels} pixels")


def check_sound(num_samples: int, rate: int, where: str, limits: Limits) -> None:
    """Raises DataError for a sound that lasts too long."""
    if num_samples > rate * limits.max_sound_s:
        raise DataError(f"{where} lasts {num_samples / rate:.4g} s; the limit is max_sound_s = {limits.max_sound_s:g}")


def decoded_base64(text: str, where: str) -> bytes:
    """Raises DataError for what is not base64. A data URL's prefix is dropped."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    with contextlib.suppress(ValueError):
        return pybase64.b64decode(text, validate=True)
    try:
        return base64.b64decode(text, validate=True)  # also takes more padding than there must be
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} is not base64: {error}") from error


def decoded_image(data: bytes, where: str, budget: Budget) -> np.ndarray:
    """uint8 [H, W, 3] of a PNG, JPEG or WebP file; alpha is dropped. Raises DataError."""
    with _opened(data, where, IMAGE_FORMATS, budget) as picture:
        if getattr(picture, "is_animated", False):  # of Pillow's formats, not all have the attribute
            raise DataError(f"{where} is an animation; send it as video_b64")
        return _rgb(picture, where)


def decoded_sound(data: bytes, where: str, budget: Budget) -> tuple[np.ndarray, int]:
    """float32 [L, C] and samples per second of a file that PyAV reads (extra `video`).

    Raises DataError, also if PyAV is missing.
    """
    av = _av(where, "is no WAV file, and reading other sounds", "a WAV file")
    waveform = _Waveform(av, where, budget)
    try:
        with _open_container(av, data) as container:
            heard = container.streams.audio[:1]
            if not heard:
                raise DataError(f"{where} holds no sound")
            if heard[0].codec_context is None:
                raise DataError(f"{where} cannot be decoded: its codec is unknown. Encode it anew.")
            for frame in container.decode(*heard):
                waveform.append(frame)
            sound = waveform.whole()
    except (av.FFmpegError, *_DECODE_ERRORS) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where} is not a sound that can be decoded") from error
    if sound is None or waveform.sample_rate is None:
        raise DataError(f"{where} is empty")
    return sound, waveform.sample_rate


class Clip(NamedTuple):
    """A decoded video."""

    frames: np.ndarray
    """uint8 [T, H, W, 3]."""
    fps: float | None
    """Frames per second."""
    sound: np.ndarray | None = None
    """float32 [L, C]."""
    sample_rate: int | None = None
    """Samples per second of the sound."""


def decoded_video(data: bytes, where: str, budget: Budget) -> Clip:
    """An animated PNG, GIF or WebP, or what PyAV reads (extra `video`), with its sound.

    Raises DataError, also if PyAV is needed and missing.
    """
    if data[:8] == b"\x89PNG\r\n\x1a\n" or data[:4] == b"GIF8" or data[8:12] == b"WEBP":
        return _animation(data, where, budget)
    return _container(data, where, budget)


def png(pixels: np.ndarray) -> str:
    """base64 PNG of uint8 [H, W, 3]."""
    return _saved(Image.fromarray(pixels), format="PNG", compress_level=1)


def animated_png(frames: np.ndarray) -> str:
    """base64 animated PNG of uint8 [T, H, W, 3], lossless. It holds no durations: Pillow would join equal frames."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    return _saved(first, format="PNG", compress_level=1, save_all=True, append_images=rest)


def _saved(picture: Image.Image, **options: Any) -> str:  # Any: keywords of Pillow's writers
    buffer = BytesIO()
    picture.save(buffer, **options)
    return pybase64.b64encode_as_string(buffer.getbuffer())


def _opened(data: bytes, where: str, formats: tuple[str, ...], budget: Budget) -> Image.Image:
    """The header of an image, its size checked and counted; no pixel is decoded yet."""
    try:
        picture = Image.open(BytesIO(data), formats=list(formats))
    except Image.DecompressionBombError as error:
        raise DataError(f"{where} has too many pixels; the limit is {budget.limits.max_pixels}") from error
    except _DECODE_ERRORS as error:
        raise DataError(f"{where} is not a {', '.join(formats)} file") from error
    check_size(*picture.size, where, budget.limits)
    if picture.mode not in _MODES:
        raise DataError(f"{where} has mode {picture.mode}; send 8 bits per channel")
    budget.take(picture.width * picture.height * 3, where)
    return picture


def _rgb(picture: Image.Image, where: str) -> np.ndarray:
    try:
        return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
    except _DECODE_ERRORS as error:
        raise DataError(f"{where} is damaged: its pixels cannot be decoded") from error


def _animation(data: bytes, where: str, budget: Budget) -> Clip:
    with _opened(data, where, ANIMATED_FORMATS, budget) as picture:
        # Of an animated PNG or WebP the header says how many frames there are.
        num_frames: int = getattr(picture, "n_frames", 1) if picture.format != "GIF" else 1
        _check_length(num_frames, picture.width, picture.height, where, budget)
        frames = _Frames(picture.width, picture.height)
        for frame in _frames(picture, where):
            _count_frame(len(frames), picture.width, picture.height, where, budget)
            frames.append(_rgb(frame, where))
        duration_ms = picture.info.get("duration")
        return Clip(frames.whole(), 1000 / duration_ms if duration_ms else None)


class _Frames:
    """uint8 [T, H, W, 3], T growing: a list that is stacked in the end holds the video twice."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.empty((1, height, width, 3), np.uint8)
        self._num_frames = 0

    def __len__(self) -> int:
        return self._num_frames

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self._pixels.shape[2], self._pixels.shape[1]

    def append(self, frame: np.ndarray) -> None:
        """frame: uint8 [H, W, 3]."""
        if len(self) == len(self._pixels):
            self._resize(len(self) + max(1, len(self) // 8))
        self._pixels[len(self)] = frame
        self._num_frames += 1

    def whole(self) -> np.ndarray:
        """The frames; more cannot be appended afterwards."""
        self._resize(len(self))
        return self._pixels

    def _resize(self, num_frames: int) -> None:
        # Pages move, bytes are not copied. No other object has a view of the array before it is whole.
        self._pixels.resize((num_frames, *self._pixels.shape[1:]), refcheck=False)


class _Waveform:
    """A sound as its parts are decoded. av: PyAV."""

    def __init__(self, av: Any, where: str, budget: Budget) -> None:  # Any: optional, absent where types are checked
        self._resampler = av.AudioResampler(format="fltp")  # planes of float32, at the rate and channels that it has
        self._where = where
        self._budget = budget
        self._parts: list[np.ndarray] = []
        self._length = 0
        self.sample_rate: int | None = None

    def append(self, frame: Any) -> None:  # Any: a frame of PyAV; None for the end
        for part in self._resampler.resample(frame):
            samples = part.to_ndarray().T
            self.sample_rate = part.sample_rate
            self._length += len(samples)
            check_sound(self._length, part.sample_rate, self._where, self._budget.limits)
            self._budget.take(samples.nbytes, self._where)
            self._parts.append(samples)

    def whole(self) -> np.ndarray | None:
        """float32 [L, C]; None without any."""
        self.append(None)
        return np.concatenate(self._parts) if self._parts else None


def _frames(picture: Image.Image, where: str) -> Iterator[Image.Image]:
    walk = iter(ImageSequence.Iterator(picture))
    while True:
        try:
            frame = next(walk)
        except StopIteration:
            return
        except _DECODE_ERRORS as error:
            raise DataError(f"{where} is damaged: its frames cannot be decoded") from error
        yield frame


def _count_frame(index: int, width: int, height: int, where: str, budget: Budget) -> None:
    _check_length(index + 1, width, height, where, budget)
    if index:
        budget.take(width * height * 3, where)


def _check_length(num_frames: int, width: int, height: int, where: str, budget: Budget) -> None:
    if num_frames > budget.limits.max_frames:
        raise DataError(f"{where} has more than max_frames = {budget.limits.max_frames} frames")
    if num_frames * width * height * 3 > budget.limits.max_video_bytes:
        raise DataError(f"{where} takes more than max_video_bytes = {budget.limits.max_video_bytes} when decoded")


def _av(where: str, problem: str, instead: str) -> Any:  # Any: optional, absent where types are checked
    """PyAV. Raises DataError if it is missing."""
    try:
        return importlib.import_module("av")
    except ModuleNotFoundError as error:
        raise DataError(
            f"{where} {problem} needs PyAV on the server. Install it there with: pip install 'unirl-reward[video]', or "
            f"send {instead}"
        ) from error


def _open_container(av: Any, data: bytes) -> Any:  # Any: optional, absent where types are checked
    # PyAV refused containers whose metadata is no UTF-8 unless told otherwise, until 19, which has no such option.
    lenient = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    return av.open(io.BytesIO(data), **lenient)


def _container(data: bytes, where: str, budget: Budget) -> Clip:
    av = _av(where, "is no animated PNG, GIF or WebP, and reading other videos", "an animated PNG")
    try:
        with _open_container(av, data) as container:
            if not container.streams.video:
                raise DataError(f"{where} holds no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise DataError(f"{where} is not a video that can be decoded: its codec is unknown")
            check_size(stream.codec_context.width, stream.codec_context.height, where, budget.limits)
            frames = _Frames(stream.codec_context.width, stream.codec_context.height)
            heard = container.streams.audio[:1]
            if heard and heard[0].codec_context is None:
                raise DataError(
                    f"the sound of {where} cannot be decoded: its codec is unknown. Encode it anew or omit it."
                )
            waveform = _Waveform(av, f"the sound of {where}", budget)
            for frame in container.decode(stream, *heard):
                if isinstance(frame, av.AudioFrame):
                    waveform.append(frame)
                    continue
                if (frame.width, frame.height) != frames.size:
                    raise DataError(f"{where} has frames of several sizes")
                if not len(frames):
                    budget.take(frame.width * frame.height * 3, where)
                _count_frame(len(frames), frame.width, frame.height, where, budget)
                frames.append(frame.to_ndarray(format="rgb24"))
            fps = float(stream.average_rate) if stream.average_rate else None
            sound = waveform.whole() if heard else None
    except (av.FFmpegError, *_DECODE_ERRORS) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where} is not a video that can be decoded") from error
    if not len(frames):
        raise DataError(f"{where} has no frames")
    return Clip(frames.whole(), fps, sound, waveform.sample_rate)
