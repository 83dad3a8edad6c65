"""Videos of samples, for people to look at: strips of frames for grids, and files that play.

Legend: F frames, H W pixels.
"""

from __future__ import annotations

import fractions
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from unirl.types.errors import ContractError, DataError
from unirl.types.samples import Sound

logger = logging.getLogger(__name__)

STRIP_FRAMES = 6
"""Most frames of a video that a grid shows."""
CODEC = "libx264"
AAC_RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 64_000, 88_200, 96_000)
"""Hertz that AAC knows; a sound of another rate is only saved as a file next to its video."""
DEFAULT_FPS = 8.0
"""Frames per second of videos that do not say."""


def strip(frames: Tensor, count: int = STRIP_FRAMES) -> Tensor:
    """`count` frames side by side, [3, H, count W], evenly spread from the first to the last of [F, 3, H, W].

    A video of fewer frames shows some of them twice, so that all strips of a grid have one size.
    """
    if frames.ndim != 4 or len(frames) == 0:
        raise ContractError(f"a strip needs frames [F, 3, H, W] with F > 0, got {tuple(frames.shape)}")
    places = torch.linspace(0, len(frames) - 1, count).round().long()
    return torch.cat(list(frames[places]), dim=-1)


def write_video(folder: Path, name: str, frames: Tensor, fps: float | None, sound: Sound | None = None) -> Path:
    """Write frames [F, 3, H, W], uint8 or float in [0, 1], as `name`.mp4 where PyAV is installed (extra `video`), else
    as `name`.gif. Returns the file.

    fps: frames per second; None plays at DEFAULT_FPS. An odd side loses its last row or column in mp4. sound: heard in
    mp4, as far as AAC takes its rate and channels.
    """
    pixels = frames if frames.dtype == torch.uint8 else frames.float().clamp(0, 1).mul(255).round().byte()
    pictures = [Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy(), "RGB") for frame in pixels]
    rate = DEFAULT_FPS if fps is None else fps
    av = _av()
    if av is None:
        return _write_gif(folder / f"{name}.gif", pictures, rate)
    path = folder / f"{name}.mp4"
    _write_mp4(av, path, pictures, rate, sound)
    return path


def read_video(path: Path) -> Tensor:
    """Frames uint8 [F, 3, H, W] of a file that `write_video` wrote. Raises DataError for MP4 without PyAV."""
    if path.suffix == ".gif":
        with Image.open(path) as file:
            frames = [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()
    av = _av()
    if av is None:
        raise DataError(f"{path} takes PyAV to read: pip install 'unirl-train[video]'")
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def as_gif(file: Path, folder: Path) -> Path:
    """A GIF of a file that `write_video` wrote: the file itself if it is one, else a new file in `folder`, without
    sound. For services that play nothing else."""
    if file.suffix == ".gif":
        return file
    av = _av()
    if av is None:
        raise DataError(f"{file} takes PyAV to read: pip install 'unirl-train[video]'")
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or DEFAULT_FPS)
        pictures = [frame.to_image() for frame in container.decode(stream)]
    return _write_gif(folder / f"{file.stem}.gif", pictures, rate)


def _write_gif(path: Path, pictures: Sequence[Image.Image], fps: float) -> Path:
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0)
    return path


def _write_mp4(av: ModuleType, path: Path, pictures: Sequence[Image.Image], fps: float, sound: Sound | None) -> None:
    width, height = (side // 2 * 2 for side in pictures[0].size)  # the pixel format has a colour per 2 x 2 pixels
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODEC, rate=fractions.Fraction(fps).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "18"}
        heard = None if sound is None or sound.rate not in AAC_RATES or not len(sound.waveform) else sound
        track = None if heard is None else container.add_stream("aac", rate=heard.rate)
        for picture in pictures:
            frame = av.VideoFrame.from_image(picture.crop((0, 0, width, height)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if heard is not None and track is not None:
            waveform = heard.waveform.float().clamp(-1, 1).view(len(heard.waveform), -1)[:, :2].T.contiguous()
            frame = av.AudioFrame.from_ndarray(waveform.numpy(), "fltp", "mono" if len(waveform) == 1 else "stereo")
            frame.sample_rate = heard.rate
            container.mux(track.encode(frame))
            container.mux(track.encode())


@cache
def _av() -> ModuleType | None:
    """PyAV, or None where it is not installed or cannot write H.264, which is said once."""
    try:
        import av
    except ImportError:
        logger.info("videos are written as GIF; for mp4 install PyAV: pip install 'unirl-train[video]'")
        return None
    if CODEC not in av.codecs_available:
        logger.warning("videos are written as GIF: this PyAV was built without %s. Install its wheel from PyPI.", CODEC)
        return None
    return av
