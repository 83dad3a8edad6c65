"""The verifiers of the sounds world: does a sound have the tone of its prompt throughout, and a video its object?

Shape letters: B samples, W windows of a sound, N of all sounds, L samples of a waveform, F frequencies of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unirl.reward.worlds.moves import score_moves
from unirl.reward.worlds.sounds_grammar import TONES, parse_prompt, video_prompt_of

WINDOWS = 4
"""Parts of equal length that are judged one by one, so that a tone that changes is heard."""
MIN_LEVEL = 0.05
"""Least root mean square of a window; full scale is 1, and drawn tones have .28 to .57."""
MIN_PURITY = 0.7
"""Least share of a window's energy next to its peak; of a drawn tone it is over .99, of noise under .1."""
PEAK_WIDTH = 2
"""Frequencies on either side of the peak that are the peak: a Hann window spreads a tone over two."""


def score_videos(videos: Sequence[Tensor], prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """`unirl.reward.worlds.moves.score_moves` for the part of each prompt that is about the video."""
    return score_moves(videos, [video_prompt_of(parse_prompt(prompt)) for prompt in prompts])


def score_sounds(waveforms: Sequence[Tensor], rate: int, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Strict and soft scores of a batch.

    waveforms: [L] or [L, channels] each, on any device, full scale 1. rate: samples per second.
    A window is right if it is loud enough, almost all of it is one frequency, and that lies in the band of the tone
    asked for. strict (0 or 1): all WINDOWS windows are right. soft: the share that is; 1 exactly when strict is.
    Returns strict_B, soft_B: float32 on the CPU.
    Raises ValueError for a prompt outside the grammar, a sound that is too short to tell the tones apart, or when the
    number of prompts is not B.
    """
    if len(waveforms) != len(prompts):
        raise ValueError(f"expected a prompt for each sound, got {len(waveforms)} sounds and {len(prompts)} prompts")
    bands_B = [TONES[parse_prompt(prompt).tone] for prompt in prompts]
    soft_B = []
    for waveform, (low, high) in zip(waveforms, bands_B, strict=True):
        pitch_W, level_W, purity_W = measure(waveform, rate)
        is_right_W = (pitch_W >= low) & (pitch_W <= high) & (level_W >= MIN_LEVEL) & (purity_W >= MIN_PURITY)
        soft_B.append(float(is_right_W.mean()))
    soft = torch.tensor(soft_B, dtype=torch.float32)
    return (soft == 1).float(), soft


def measure(waveform: Tensor, rate: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pitch in Hz, root mean square and purity of each window of a sound, each [W].

    The pitch is the strongest frequency, the purity its share of the energy. Channels are averaged.
    """
    own_L = waveform.detach().float().cpu().numpy()
    own_L = own_L.mean(axis=1) if own_L.ndim == 2 else own_L
    length = len(own_L) // WINDOWS
    lowest = min(low for low, _ in TONES.values())
    if length < 2 * (2 * PEAK_WIDTH + 1) or rate / length > lowest / (PEAK_WIDTH + 1):
        raise ValueError(
            f"a sound of {len(own_L)} samples at {rate} Hz is too short to tell tones apart in each of {WINDOWS} "
            f"windows. Make it at least {WINDOWS * (PEAK_WIDTH + 1) / lowest:.3f} s long."
        )
    windows_WL = own_L[: length * WINDOWS].reshape(WINDOWS, length).astype(np.float64)
    level_W = np.sqrt(np.square(windows_WL).mean(axis=1))
    energy_WF = np.square(np.abs(np.fft.rfft(windows_WL * np.hanning(length), axis=1)))
    peak_W = energy_WF.argmax(axis=1)
    is_near_WF = np.abs(np.arange(energy_WF.shape[1]) - peak_W[:, None]) <= PEAK_WIDTH
    whole_W = energy_WF.sum(axis=1)
    purity_W = np.where(is_near_WF, energy_WF, 0).sum(axis=1) / np.where(whole_W > 0, whole_W, 1)
    return peak_W * rate / length, level_W, purity_W
