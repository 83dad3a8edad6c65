"""One sample as it travels, and the way from and to the requests that scorers know.

Legend: B samples, T frames, H W pixels, L samples of a waveform, C channels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unirl.reward.local.pixels import RANGE_TOLERANCE
from unirl.types.errors import ContractError, DataError
from unirl.types.media import Audios, Images, Primitive, Texts, Videos, pixel_floats
from unirl.types.reward import RewardRequest

Kind = Literal["image", "video", "text", "audio"]
Pixels = Literal["lossless", "uint8"]
"""`lossless`: as bytes where bytes hold every pixel exactly, as float32 otherwise. `uint8`: round(255 * pixel), what
a PNG would hold; a quarter of the size."""


class SchemaError(DataError):
    """A body lacks a field or holds a value of a wrong type. Servers answer 422; 400 is for other wrong values."""


@dataclass(frozen=True)
class Limits:
    """What a body may ask of its reader. All are checked before the memory is taken."""

    max_samples: int = 1024
    """Samples of one body."""
    max_pixels: int = 4096 * 4096
    """Pixels of one image or frame."""
    max_frames: int = 1024
    """Frames of one video."""
    max_media_bytes: int = 1024**3
    """Decoded media of one body, all samples together."""
    max_video_bytes: int = 1024**3
    """One video of a JSON body, decoded."""
    max_sound_s: float = 600.0
    """Seconds of one sound; at a low rate few bytes last long, and scorers bring them to a higher one."""
    max_text_chars: int = 1_000_000
    """Characters of one text."""
    max_json_nodes: int = 1_000_000
    """Values of one JSON document, about; bounds what parsing it allocates."""


UNLIMITED = Limits(
    max_samples=2**31,
    max_pixels=2**40,
    max_frames=2**31,
    max_media_bytes=2**50,
    max_video_bytes=2**50,
    max_sound_s=math.inf,
    max_text_chars=2**40,
    max_json_nodes=2**40,
)
"""For bodies of a side that is trusted, or that another has checked."""


@dataclass(frozen=True, eq=False)
class WireSample:
    """One generated sample with what it was made from."""

    id: str
    kind: Kind
    media: np.ndarray | str | None
    """Image [H, W, 3] or video [T, H, W, 3], uint8, or float32 in [0, 1]; a sound float32 [L] or [L, C]; a text is a
    str. None: not decoded, because no reward that is asked for takes its kind."""
    prompt: str | None = None
    source: np.ndarray | None = None
    """The input image [H, W, 3] of an edit or of a question about an image."""
    group_id: str | None = None
    fps: float | None = None
    """Frames per second of a video."""
    sound: np.ndarray | None = None
    """Waveform of a video, float32 [L] or [L, C]."""
    sample_rate: int | None = None
    """Samples per second of the sound, or of the video's."""
    source_sound: np.ndarray | None = None
    """The sound of the prompt, float32 [L] or [L, C]; empty for a prompt without one among others."""
    source_sample_rate: int | None = None
    """Samples per second of the prompt's sound."""
    metadata: dict[str, Any] | None = None  # Any: rows of a user's data file

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels and its sounds."""
        arrays = (self.media, self.source, self.sound, self.source_sound)
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


@dataclass(frozen=True, eq=False)
class ScoreCall:
    """The body of one POST /score."""

    samples: list[WireSample]
    rewards: list[tuple[str, ...]]
    """For each sample the names of the rewards that it asks for."""


def samples_of(request: RewardRequest, pixels: Pixels = "lossless") -> list[WireSample]:
    """The B samples of a request.

    Raises ContractError for what does not travel: several generated media, inputs other than text, image and audio,
    pixels that are not finite or not in [0, 1], sounds of float64, and metadata that JSON would change.
    """
    extra = sorted(set(request.primitives) - {"text", "image", "audio"})
    if extra:
        raise ContractError(f"inputs {extra} cannot be sent to a reward server; it takes text, image and audio")
    if len(request.generated) != 1:
        raise ContractError(f"one generated medium can be sent at a time; the request has {sorted(request.generated)}")
    [(slot, generated)] = request.generated.items()
    ids = request.sample_ids
    media = _media_of(generated, slot, ids, pixels)
    arrays = [None] * len(ids) if "image" not in request.primitives else _arrays(_one_each(request), ids, pixels)
    prompts = request.prompts if "text" in request.primitives else [None] * len(ids)
    audio = generated.audio if isinstance(generated, Videos) else None
    sounds = [None] * len(ids) if audio is None else _sounds(audio, ids)
    heard = request.source_sounds if "audio" in request.primitives else None
    source_sounds = [None] * len(ids) if heard is None else _sounds(heard, ids)
    rated = generated if isinstance(generated, Audios) else audio
    return [
        WireSample(
            id=ids[i],
            kind=_KINDS[type(generated)],
            media=media[i],
            prompt=prompts[i],
            source=arrays[i],
            group_id=request.group_ids[i] if request.group_ids else None,
            fps=generated.fps if isinstance(generated, Videos) else None,
            sound=sounds[i],
            sample_rate=None if rated is None else rated.sample_rate,
            source_sound=source_sounds[i],
            source_sample_rate=None if heard is None else heard.sample_rate,
            metadata=_checked_metadata(request.metadata[i], ids[i]) if request.metadata else None,
        )
        for i in range(len(ids))
    ]


def batch_key(sample: WireSample) -> tuple[object, ...]:
    """Samples with equal keys fit into one request."""
    source_shape = None if sample.source is None else sample.source.shape
    sounds = (
        *(None if sound is None else sound.shape[1:] for sound in (sample.sound, sample.source_sound)),
        *(sample.sample_rate, sample.source_sample_rate),
    )
    has_none = (sample.prompt is None, sample.group_id is None)
    return sample.kind, _shared_shape(sample), source_shape, has_none, sample.fps, sounds


def _shared_shape(sample: WireSample) -> tuple[int, ...] | None:
    """The sizes that the media of one request have in common: all but frames, and samples of a sound."""
    if not isinstance(sample.media, np.ndarray):
        return None
    return sample.media.shape[1:] if sample.kind == "audio" else sample.media.shape[-3:]


def request_of(samples: Sequence[WireSample]) -> RewardRequest:
    """Samples of one `batch_key` as the request that scorers take; pixels are float32, a byte k is k / 255. Frames of
    generated videos that came as bytes stay bytes, a quarter of the memory: `in_floats` makes floats of what is scored.

    Raises ContractError if the samples do not fit together.
    """
    keys = {batch_key(sample) for sample in samples}
    if len(keys) != 1:
        raise ContractError(
            f"{len(samples)} samples of {len(keys)} shapes do not make one request: {sorted(map(str, keys))}"
        )
    first = samples[0]
    primitives: dict[str, Primitive] = {}
    if first.prompt is not None:
        primitives["text"] = Texts(texts=[str(sample.prompt) for sample in samples])
    if first.source is not None:
        primitives["image"] = Images(pixels=_channels_first([sample.source for sample in samples]))
    if first.source_sound is not None:
        heard = [sample.source_sound for sample in samples]
        primitives["audio"] = _audios(heard, first.source_sample_rate)
    return RewardRequest(
        sample_ids=[sample.id for sample in samples],
        group_ids=[] if first.group_id is None else [str(sample.group_id) for sample in samples],
        primitives=primitives,
        generated={first.kind: _generated(samples)},
        metadata=[sample.metadata for sample in samples],
    )


_KINDS: dict[type, Kind] = {Images: "image", Videos: "video", Texts: "text", Audios: "audio"}


def _one_each(request: RewardRequest) -> list[Tensor]:
    """The input image of each sample."""
    counts = sorted({len(sample) for sample in request.sources})
    if counts != [1]:
        raise ContractError(f"one input image per sample can be sent to a reward server; the samples have {counts}")
    return [image for (image,) in request.sources]


def _media_of(generated: Primitive, slot: str, ids: list[str], pixels: Pixels) -> list[np.ndarray] | list[str]:
    if isinstance(generated, Texts):
        return generated.texts
    if isinstance(generated, Images):
        return _arrays(list(generated.pixels), ids, pixels)
    if isinstance(generated, Videos):
        return _arrays(generated.unpack("frames"), ids, pixels)
    if isinstance(generated, Audios):
        return _sounds(generated, ids)
    raise ContractError(f"generated {slot} ({type(generated).__name__}) cannot be sent to a reward server")


def _arrays(media: list[Tensor], ids: list[str], pixels: Pixels) -> list[np.ndarray]:
    """[..., 3, H, W] -> [..., H, W, 3]. One sample at a time, so that the extra memory stays small."""
    found = []
    for name, value in zip(ids, media, strict=True):
        value = pixel_floats(value.detach()).to("cpu", torch.float32)
        if value.shape[-3] != 3:
            raise ContractError(f"sample {name}: media must have 3 channels, got {tuple(value.shape)}")
        low, high = (value.min().item(), value.max().item()) if value.numel() else (math.nan, math.nan)
        if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
            raise ContractError(f"sample {name}: pixels must be finite and in [0, 1], got {low:.4g} to {high:.4g}")
        scaled = (value.clamp(0, 1) * 255).round()
        is_exact = pixels == "uint8" or bool((scaled / 255 == value).all())
        kept = scaled.to(torch.uint8) if is_exact else value
        found.append(np.ascontiguousarray(kept.movedim(-3, -1).numpy()))
    return found


def _sounds(audio: Audios, ids: list[str]) -> list[np.ndarray]:
    """Waveforms [L] or [L, C] in float32, which holds each number of the shorter types."""
    if audio.waveform.dtype == torch.float64:
        raise ContractError(f"sample {ids[0]}: its sound is {audio.waveform.dtype}; sounds travel as float32")
    waveforms = audio.unpack("waveform")
    return [np.ascontiguousarray(waveform.detach().to("cpu", torch.float32).numpy()) for waveform in waveforms]


def _generated(samples: Sequence[WireSample]) -> Primitive:
    kind = samples[0].kind
    if kind == "text":
        return Texts(texts=[str(sample.media) for sample in samples])
    if kind == "image":
        return Images(pixels=_channels_first([sample.media for sample in samples]))
    if kind == "audio":
        return _audios([sample.media for sample in samples], samples[0].sample_rate)
    frames = [_video_channels_first(sample.media) for sample in samples]
    if {each.dtype for each in frames} != {torch.uint8}:
        frames = [pixel_floats(each) for each in frames]
    sounds = [sample.sound for sample in samples]
    audio = None if sounds[0] is None else _audios(sounds, samples[0].sample_rate)
    return Videos.pack(frames=frames, fps=samples[0].fps, audio=audio)


def _audios(sounds: Sequence[np.ndarray | str | None], rate: int | None) -> Audios:
    """Waveforms [L] or [L, C], as many channels in each."""
    waveforms = [torch.from_numpy(np.array(sound)) for sound in sounds if isinstance(sound, np.ndarray)]
    if len(waveforms) != len(sounds):
        raise ContractError(f"{len(sounds) - len(waveforms)} of {len(sounds)} samples have no sound")
    return Audios.pack(waveform=waveforms, sample_rate=rate)


def _video_channels_first(array: np.ndarray | str | None) -> Tensor:
    """[T, H, W, 3] -> [T, 3, H, W] of the same dtype."""
    if not isinstance(array, np.ndarray):
        raise ContractError("a video sample has no pixels")
    return torch.from_numpy(np.array(np.moveaxis(array, -1, -3), order="C"))


def _channels_first(arrays: Sequence[np.ndarray | str | None]) -> Tensor:
    """B arrays [..., H, W, 3] of one shape -> float32 [B, ..., 3, H, W]."""
    media = [array for array in arrays if isinstance(array, np.ndarray)]
    if len(media) != len(arrays):
        raise ContractError(f"{len(arrays) - len(media)} of {len(arrays)} samples have no pixels")
    turned = [np.moveaxis(array, -1, -3) for array in media]
    pixels = torch.empty(len(turned), *turned[0].shape)
    for target, array in zip(pixels.numpy(), turned, strict=True):
        if array.dtype == np.uint8:
            np.divide(array, np.float32(255), out=target, dtype=np.float32)
        else:
            np.copyto(target, array)
    return pixels


def _checked_metadata(row: dict[str, Any] | None, name: str) -> dict[str, Any] | None:  # Any: a user's data
    try:
        is_kept = json.loads(json.dumps(row, allow_nan=False)) == row
    except (TypeError, ValueError) as error:
        raise ContractError(f"sample {name}: its metadata cannot be sent as JSON: {error}") from error
    if not is_kept:
        raise ContractError(
            f"sample {name}: its metadata would change in JSON (a tuple, or a key that is no string): {str(row)[:200]}"
        )
    return row
