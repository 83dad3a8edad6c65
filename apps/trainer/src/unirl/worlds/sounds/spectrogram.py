"""Spectrograms of the sounds world: what its audio autoencoder encodes and its vocoder hears.

Shape letters: B sounds, L samples, P columns, F frequencies, M mel bins.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from unirl.worlds.sounds.world import HOP, RATE

MEL_BINS = 16
WINDOW = 2 * HOP
"""Samples that a column sees, in a Hann window about its middle."""
_RANGE_HZ = (150.0, 1600.0)
_FLOOR = 0.01
"""Amplitude that is as good as silence."""


def spectrogram(waves_BL: Tensor) -> Tensor:
    """Logarithms of the amplitudes in each mel bin, scaled to about [-1, 1]; [B, 1, L / HOP, M].

    A sine of amplitude a in the middle of a bin has log a there before the scaling.
    """
    padded = torch.nn.functional.pad(waves_BL, ((WINDOW - HOP) // 2,) * 2)
    window = torch.hann_window(WINDOW)
    amplitude_BPF = torch.fft.rfft(padded.unfold(1, WINDOW, HOP) * window).abs() * (2 / window.sum())
    log_BPM = (amplitude_BPF @ _filters()).clamp(min=_FLOOR).log()
    middle = torch.tensor(_FLOOR).log() / 2
    return (log_BPM / -middle + 1)[:, None]


@cache
def _filters() -> Tensor:
    """Triangles between neighbouring points of the mel scale, [F, M]; each is 1 at its middle."""
    low, high = (2595 * torch.tensor(1 + hz / 700).log10() for hz in _RANGE_HZ)
    edges_hz = 700 * (10 ** (torch.linspace(float(low), float(high), MEL_BINS + 2) / 2595) - 1)
    frequencies_F1 = torch.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising = (frequencies_F1 - edges_hz[:-2]) / (edges_hz[1:-1] - edges_hz[:-2])
    falling = (edges_hz[2:] - frequencies_F1) / (edges_hz[2:] - edges_hz[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)
