"""Latents that a request gives: a velocity that leads straight to them. R: rows of a batch.

On the way from a noise to a known x_0, x = (1 - sigma) x_0 + sigma noise, and the velocity noise - x_0 is
(x - x_0) / sigma. Published samplers put such latents into place after every step; walked by this velocity they are
there, whatever the kernel, and a trajectory ends on them and replays like any other. They have no gradient, so the
mean log-ratio of a sample is that of the other elements times their share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.sde.loop import Velocity


def towards(known_R: Tensor, x_R: Tensor, sigma_R: Tensor) -> Tensor:
    """(x - x_0) / sigma, [R, ...]."""
    return (x_R - known_R) / sigma_R.view(-1, *(1 for _ in x_R.shape[1:]))


def keeping(velocity: Velocity, known_R: Tensor, is_new_R: Tensor) -> Velocity:
    """The velocity where `is_new_R` (bool, broadcast over [R, ...]) and that towards `known_R` elsewhere."""

    def kept(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        return torch.where(is_new_R, velocity(x_R, sigma_R, step_R), towards(known_R, x_R, sigma_R))

    return kept
