"""The coefficient of a KL penalty: fixed, or driven towards a target."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.types.bounds import Positive, bounded


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon).

    kl, target: the same estimator and unit. horizon: samples over which a full correction acts.
    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_samples / horizon)


@bounded("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL:
    """Drives the penalty's coefficient so that the measured KL stays near `target`."""

    target: Positive
    horizon: Positive
