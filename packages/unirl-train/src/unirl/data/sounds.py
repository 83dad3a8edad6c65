"""The sounds of prompt rows, as waveforms at one rate. Legend: L samples in time, C channels, K taps of a filter."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unirl.data.media import MediaRef, sound_problem
from unirl.types.errors import DataError
from unirl.types.media import Audios

SAMPLE_RATE = 16_000
"""Hertz, which speech encoders read."""
_ZERO_CROSSINGS = 24
"""Zero crossings of the filter, on each side: the more, the steeper it cuts."""
_ROLLOFF = 0.94
"""Share of the frequencies that both rates have which pass unchanged."""


def prompt_sounds(prompts: Sequence[Sequence[MediaRef]]) -> Audios:
    """The sound of each prompt at SAMPLE_RATE, empty for a prompt without one.

    Raises DataError for a sound that is missing or broken, and for more than one per prompt.
    """
    crowded = next((refs for refs in prompts if len(refs) > 1), None)
    if crowded is not None:
        raise DataError(
            f"a prompt has {len(crowded)} sounds ({crowded[0].uri}, ...); it takes one. Join or remove them."
        )
    return Audios.pack(
        waveform=[read_sound(refs[0]) if refs else torch.zeros(0) for refs in prompts], sample_rate=SAMPLE_RATE
    )


def read_sound(ref: MediaRef) -> Tensor:
    """Waveform [L] float32 in [-1, 1] at SAMPLE_RATE, the mean of all channels. Raises DataError."""
    problem = sound_problem(ref)
    if problem is not None:
        raise DataError(f"the sound {ref.uri} {problem}. Mend its path or remove the row.")
    with wave.open(ref.place()[0] if ref.data is None else io.BytesIO(ref.data)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = file.readframes(file.getnframes())
    return resampled(_numbers(data, width).view(-1, channels).mean(dim=1), rate, SAMPLE_RATE)


def resampled(waveform: Tensor, rate: int, wanted: int) -> Tensor:
    """Waveform [L] at another rate, [ceil(L wanted / rate)] float32; equal rates give the same numbers.

    Every output is a sum over a windowed sinc that stops what the lower of the two rates cannot hold.
    Source: Smith, Digital Audio Resampling (ccrma.stanford.edu/~jos/resample).
    """
    if rate == wanted:
        return waveform
    divisor = math.gcd(rate, wanted)
    down, up = rate // divisor, wanted // divisor
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    # One filter for each of the `up` outputs in a period of `down` inputs.
    phase = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    offset_UK = torch.arange(-half, down + half, dtype=torch.float64)[None] - phase
    window_UK = torch.where(offset_UK.abs() < half, (math.pi * offset_UK / (2 * half)).cos().square(), 0.0)
    taps_UK = (cutoff * torch.sinc(cutoff * offset_UK) * window_UK).float()
    length = math.ceil(waveform.numel() * up / down)
    padded = functional.pad(waveform, (half, down + half))
    out = functional.conv1d(padded[None, None], taps_UK[:, None], stride=down)[0]
    return out.T.flatten()[:length]


def _numbers(data: bytes, width: int) -> Tensor:
    """Samples in [-1, 1] of a WAV file: unsigned of one byte, else signed and little-endian."""
    if width == 1:
        return (torch.frombuffer(bytearray(data), dtype=torch.uint8).float() - 128) / 128
    if width == 3:
        three = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3)
        whole = functional.pad(three, (1, 0)).contiguous().view(torch.int32).flatten()
        return (whole.double() / 2**31).float()
    kind = torch.int16 if width == 2 else torch.int32
    return (torch.frombuffer(bytearray(data), dtype=kind).double() / 2 ** (8 * width - 1)).float()
