"""The next latents of a trajectory, noised further: where Trajectory Distribution Matching (TDM) compares two scores.

The student's step from level s_n to s_m ends at x_m = x + s_m (x_n - x) / s_n, with x the clean latent that it
predicts.
A higher level s is reached by less of it and more noise, with a = (1 - s) / (1 - s_m) and b^2 = s^2 - a^2 s_m^2:

    x_s = a x_m + b eps

Whoever knows x regresses to (x_s - x) / s, what flow matching would at that noise. Whoever knows x_m alone, as of a
latent of another policy's trajectory, takes the velocity of the score of x_s given x_m, - eps / b:

    v = - x_m / (1 - s_m) + eps / b (s + a s_m^2 / (1 - s_m))

Both are eps - x where s_m = 0, which is the last step.
Sources: TDM, Luo et al. 2025 (arXiv 2503.06674); TDM-R1, Luo et al. 2026 (arXiv 2603.07700), and the code of both.
Legend: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.losses import same_shape
from unirl.sde.forward import predict_x0
from unirl.sde.rows import over_rows

Matching = Literal["samples", "trajectory"]
TrajectoryLevels = Literal["step", "above"]

SMALLEST_RISE = 0.02
"""Least distance of a noise level from that of the latent which is noised: eps / b has no bound at 0."""


@dataclass(frozen=True)
class StepLevels:
    """The levels of R steps, [R] float32 each."""

    before: Tensor
    after: Tensor

    def drawn(self, draws_R: Tensor, low: float, high: float, *, levels: TrajectoryLevels) -> Tensor:
        """Levels [R] for draws that are uniform in [0, 1): between low and high, and above that after the step.

        levels: "step" draws none above that before the step, so that the levels of two steps share no interval; "above"
        any up to `high`. Where low and high leave nothing, the level is the nearest that the step allows.
        """
        least = self.after + torch.full_like(self.after, SMALLEST_RISE).minimum((1 - self.after) / 2)
        top = self.before.clamp(max=high) if levels == "step" else torch.full_like(self.before, high)
        top = top.maximum(least)
        bottom = least.clamp(min=low).minimum(top)
        return bottom + (top - bottom) * draws_R.to(bottom)


def next_latent(x_n: Tensor, x: Tensor, at: StepLevels) -> Tensor:
    """x_m [R, ...], where Euler's step from x_n with the clean latent x ends."""
    same_shape(x_n=x_n, x=x)
    velocity = (x_n - x) / over_rows(at.before, x_n)
    return predict_x0(x_n, velocity, at.before - at.after)


def raised(x_m: Tensor, noise: Tensor, after_R: Tensor, level_R: Tensor) -> Tensor:
    """x_s [R, ...]: latents at the levels `after_R` noised to the higher levels `level_R`."""
    same_shape(x_m=x_m, noise=noise)
    a_R, b_R = _coefficients(after_R, level_R)
    return over_rows(a_R, x_m) * x_m + over_rows(b_R, x_m) * noise


def clean_target(x_s: Tensor, x: Tensor, level_R: Tensor) -> Tensor:
    """(x_s - x) / s, the velocity from the clean latent x to x_s, [R, ...]."""
    same_shape(x_s=x_s, x=x)
    return (x_s - x) / over_rows(level_R, x)


def latent_target(x_m: Tensor, noise: Tensor, after_R: Tensor, level_R: Tensor) -> Tensor:
    """The velocity of the score of x_s given x_m, [R, ...]; at the level of x_m it has no bound."""
    same_shape(x_m=x_m, noise=noise)
    a_R, b_R = _coefficients(after_R, level_R)
    of_noise_R = (level_R + a_R * after_R.square() / (1 - after_R)) / b_R
    return over_rows(of_noise_R, x_m) * noise - x_m / over_rows(1 - after_R, x_m)


def _coefficients(after_R: Tensor, level_R: Tensor) -> tuple[Tensor, Tensor]:
    a_R = (1 - level_R) / (1 - after_R)
    return a_R, (level_R.square() - (a_R * after_R).square()).clamp(min=0).sqrt()
