"""Prompt sounds in the form that engines in other processes take: float32 in base64, one placeholder token each."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Audios, Primitive


def heard_sounds(sounds: Primitive | None) -> tuple[list[str], list[list[int]], int]:
    """The sounds of a slot, the indices of those that each sample hears (none or one), and their samples per second.

    sounds: Audios of mono waveforms, empty where a sample hears nothing, or None. Equal waveforms are encoded once.
    Raises ConfigError for another type.
    """
    if sounds is None:
        return [], [], 0
    if not isinstance(sounds, Audios) or sounds.waveform.ndim != 1 or sounds.sample_rate is None:
        raise ConfigError(
            f"the slot 'audio' must hold Audios of mono waveforms at a sample rate, got {type(sounds).__name__}"
        )
    places: dict[bytes, int] = {}
    heard: list[list[int]] = []
    for own in sounds.unpack("waveform"):
        samples = own.float().cpu().contiguous().numpy().tobytes()
        heard.append([places.setdefault(samples, len(places))] if samples else [])
    return [base64.b64encode(samples).decode() for samples in places], heard, sounds.sample_rate


def waveform(text: str) -> Tensor:
    """The waveform float32 [L] in a text of `heard_sounds`. Raises ContractError for anything else."""
    try:
        return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float32)
    except ValueError as error:
        raise ContractError(f"a sound must be float32 samples in base64, got {text[:40]!r} ({error})") from error
