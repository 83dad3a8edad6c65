"""What learning a value has in common for latents and tokens: its loss, its metrics, its options. Legend: R rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.types.devices import widened

_RETURN = "ppo/return_mean"
_RETURN_SQUARE, _ERROR, _ERROR_SQUARE = "return_square", "value_error", "value_error_square"
"""Summed over rows to become `ppo/explained_variance`."""

ROUNDING = 1e-12
"""Relative variance below which returns count as equal: a difference of float64 means is no more exact."""


def value_loss(value_R: Tensor, old_R: Tensor, return_R: Tensor, *, clip: float | None) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), [R]; without clip 1/2 (V - R)^2.

    value_R carries gradients. old_R: the values before the first update. return_R: what to regress to.
    A value that left the band in the direction of its return gets no gradient.
    Source: the value clipping of PPO's first implementation (OpenAI baselines), as in TRL.
    """
    plain = (value_R - return_R).square()
    if clip is None:
        return 0.5 * plain
    clipped = old_R + (value_R - old_R).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (clipped - return_R).square())


def report_values(metrics: RowMetrics, value_R: Tensor, return_R: Tensor, loss_R: Tensor) -> None:
    """The critic's metrics; `explain_variance` completes them once they are reduced."""
    error_R = widened((return_R - value_R).detach())
    metrics.mean("ppo/value_loss", loss_R)
    metrics.mean("ppo/value_mean", value_R)
    metrics.mean(_RETURN, return_R)
    metrics.mean(_RETURN_SQUARE, widened(return_R).square())
    metrics.mean(_ERROR, error_R)
    metrics.mean(_ERROR_SQUARE, error_R.square())


def explain_variance(metrics: dict[str, float]) -> None:
    """Turn the sums of squares into the explained variance, 1 - Var(R - V) / Var(R); nan where R does not vary."""
    if _RETURN not in metrics:
        return  # no row was trained
    mean_square = metrics.pop(_RETURN_SQUARE)
    variance = mean_square - metrics[_RETURN] ** 2
    residual = metrics.pop(_ERROR_SQUARE) - metrics.pop(_ERROR) ** 2
    varies = variance > ROUNDING * mean_square
    metrics["ppo/explained_variance"] = 1 - residual / variance if varies else math.nan
