"""The noise level of the sound next to that of the video, and both as one process of flow matching.

The released model walks two schedules, sigma = s u / (1 + (s - 1) u) of the same u, with a shift s of 12 for the video
and 3 for the sound. Their odds, (1 - sigma) / sigma = (1 - u) / (s u), are then in the ratio c = s_video / s_sound
everywhere, so that latents of sound z = (1 - sigma_sound) z0 + sigma_sound eps become, times k = sigma / sigma_sound,
    k z = (1 - sigma) c z0 + sigma eps        k = sigma + c (1 - sigma)
flow matching at the level sigma of the video, of clean latents c z0. Kernels, solvers and losses see k z, and one level
per row. A step of Euler's method from level to level is the same step in both coordinates.
Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from torch import Tensor


def sound_scale(sigma_R: Tensor, c: float) -> Tensor:
    """k [R], of latents of sound at the video's level: 1 at pure noise, c where nothing is left of it."""
    return sigma_R + c * (1 - sigma_R)


def sound_sigma(sigma_R: Tensor, c: float) -> Tensor:
    """Level [R] of the sound at the video's."""
    return sigma_R / sound_scale(sigma_R, c)


def sound_velocity(x: Tensor, velocity: Tensor, k: Tensor, c: float) -> Tensor:
    """eps - c z0 of scaled latents x = k z and the model's velocity eps - z0 of z. k: `sound_scale`, broadcast."""
    return ((1 - c) * x + c * velocity) / k
