"""Correction for the gap between the engine that sampled and the policy that trains on its samples.

An engine computes log-probs with other kernels, precision and, when it runs ahead, older weights; its samples are then
another policy's. Weights of importance bring them back. Legend as in `token_losses`: B sequences, M tokens. Of images
and videos a token is a stochastic step and a sequence the trained ones of a trajectory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.correction_rules import unusable_bounds
from unirl.algorithms.token_losses import require_choice, sequence_index, sequence_mean, sequence_sum
from unirl.types.bounds import NonNegativeInt, Positive, bounded
from unirl.types.errors import ConfigError

CorrectionLevel = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask", "reject"]

MAX_WEIGHT = 2.0**29
"""5e8, which float32 holds exactly. The sum over a long sequence would overflow its exponential without any bound."""


def correction_weights(
    log_gap_M: Tensor,
    lengths_B: Tensor,
    *,
    level: CorrectionLevel,
    mode: CorrectionMode,
    lower: float | None,
    upper: float | None,
) -> Tensor:
    """Weights [M], without gradient, that the losses of the tokens are multiplied by.

    log_gap_M: log p_trainer - log p_engine of the sampled tokens, both before the first update.
    level: the ratio r is exp of the token's gap ("token"), of the sum over its sequence ("sequence": unbiased, and
        wild for long ones), or of the mean over its sequence ("geometric").
    mode: clamp r to [lower, upper] ("truncate"), keep r inside and put 0 outside ("mask"), or put 1 inside and 0
        outside ("reject"). A bound of None does not bind; r is at most MAX_WEIGHT all the same.
    Sources: Espeholt et al. 2018 (arXiv 1802.01561), truncated importance sampling; the modes are those of TRL.
    """
    gap_M = log_gap_M.detach()
    if level != "token":
        require_choice("rollout_correction.level", level, CorrectionLevel)
        reduce = sequence_sum if level == "sequence" else sequence_mean
        gap_M = reduce(gap_M, lengths_B)[sequence_index(lengths_B)]
    ratio_M = gap_M.exp().clamp(max=MAX_WEIGHT)
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    if mode == "truncate":
        return ratio_M.clamp(low, high)
    require_choice("rollout_correction.mode", mode, CorrectionMode)
    is_inside = (ratio_M >= low) & (ratio_M <= high)
    return torch.where(is_inside, ratio_M if mode == "mask" else torch.ones_like(ratio_M), 0.0)


def second_moment_cut(moment_M: Tensor, threshold: float) -> Tensor:
    """The smallest of the second moments that M2PO masks, a scalar: all that are less stay; inf where all stay.

        masks the largest moments until the mean of the rest is at most the threshold

    moment_M: (log p_trainer - log p_engine)^2 of some tokens, in any order, from which nothing depends: tokens of equal
        moments stay or go together. What is not a number counts as the largest. Sums are float64, on the CPU.
    Source: Zheng et al. 2025 (arXiv 2510.01161), M2PO.
    """
    sorted_M = moment_M.detach().cpu().nan_to_num(math.inf, math.inf).sort().values
    mean_M = sorted_M.double().cumsum(0) / torch.arange(1, sorted_M.numel() + 1)
    allowed = (mean_M <= threshold).nonzero()
    num_kept = 0 if allowed.numel() == 0 else int(allowed[-1]) + 1
    return sorted_M.new_tensor(math.inf) if num_kept == sorted_M.numel() else sorted_M[num_kept]


@bounded("rollout_correction")
@dataclass(frozen=True)
class RolloutCorrection:
    """Weights of importance between engine and trainer; needs an anchor replayed by the trainer.

    level, mode, lower, upper: see `correction_weights`. Log-probs of denoising steps are the kernel's: with
        `strategy.reduction: mean` over the N elements of a latent, the ratio is the N-th root of that of densities.
    max_staleness: tokens or steps of a policy more than this many optimizer steps old get the weight 0; None keeps all.
    m2_threshold: tokens or steps of the largest second moment get the weight 0 too, see `second_moment_cut`; 0.04 is
        the paper's for tokens. They are judged over all that an optimizer step trains on, on all devices, those aside
        that already have the weight 0. Costs a forward without gradients before the first update.
    noise_floor: denoising steps of samples that are at least one optimizer step old get the weight 0 if the standard
        deviation s of their noise is below this, and do not count in the ratio of their sequence: the log-ratio of two
        policies grows as 1 / s. Of denoising steps alone; None leaves out none.
    A token or step with weight 0 stays in the number of terms that the loss is divided by.
    """

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    lower: float | None = None
    upper: float | None = 2.0
    max_staleness: NonNegativeInt | None = None
    m2_threshold: Positive | None = None
    noise_floor: Positive | None = None

    def __post_init__(self) -> None:
        problem = unusable_bounds(
            "algorithm.rollout_correction",
            self.mode,
            self.lower,
            self.upper,
            masks=self.m2_threshold is not None,
            drops=self.max_staleness is not None or self.noise_floor is not None,
        )
        if problem is not None:
            raise ConfigError(problem)

    def weights(
        self, log_gap_M: Tensor, lengths_B: Tensor, staleness_M: Tensor | None, noise_M: Tensor | None = None
    ) -> Tensor:
        """Weights [M]. staleness_M: optimizer steps since each token's policy; None if unknown. noise_M: standard
        deviation of the noise of each denoising step, for `noise_floor`.

        Raises ConfigError for a `max_staleness` or `noise_floor` that cannot be told.
        """
        if self.noise_floor is None or noise_M is None:
            weight_M = self._bounded(log_gap_M, lengths_B)
        else:
            is_stale_M = self._older_than(0, staleness_M, "noise_floor")
            is_left_M = ~(is_stale_M.to(noise_M.device) & (noise_M < self.noise_floor)).to(log_gap_M.device)
            weight_M = torch.zeros_like(log_gap_M)
            weight_M[is_left_M] = self._bounded(log_gap_M[is_left_M], sequence_sum(is_left_M.long(), lengths_B))
        if self.max_staleness is None:
            return weight_M
        is_old_M = self._older_than(self.max_staleness, staleness_M, "max_staleness")
        return torch.where(is_old_M.to(weight_M.device), 0.0, weight_M)

    def _bounded(self, log_gap_M: Tensor, lengths_B: Tensor) -> Tensor:
        return correction_weights(
            log_gap_M, lengths_B, level=self.level, mode=self.mode, lower=self.lower, upper=self.upper
        )

    @staticmethod
    def _older_than(num_steps: int, staleness_M: Tensor | None, key: str) -> Tensor:
        """bool [M]: those that are more than `num_steps` optimizer steps old."""
        if staleness_M is None:
            raise ConfigError(
                f"algorithm.rollout_correction.{key} needs the version of the policy on every sample, which this "
                f"engine does not give. Set {key}: null."
            )
        return staleness_M > num_steps


def report_second_moment(metrics: RowMetrics, gap_M: Tensor, weight_M: Tensor, is_masked_M: Tensor) -> None:
    """What M2PO's mask did to some tokens or steps: the fraction that it left out, and the mean second moment of those
    that it judged, before and after."""
    moment_M, is_kept_M = gap_M.square(), weight_M != 0
    metrics.mean("mismatch/m2/masked_fraction", is_masked_M.float())
    metrics.mean("mismatch/m2/before", moment_M[is_kept_M | is_masked_M])
    metrics.mean("mismatch/m2/after", moment_M[is_kept_M])


def report_correction(metrics: RowMetrics, weight_M: Tensor) -> None:
    """What the weights [M] of some tokens or steps come to."""
    metrics.mean("mismatch/correction/mean", weight_M)
    metrics.mean("mismatch/correction/dropped_fraction", (weight_M == 0).float())
    metrics.mean("mismatch/correction/bounded_fraction", (weight_M == MAX_WEIGHT).float())


def report_staleness(metrics: RowMetrics, staleness_B: Tensor) -> None:
    """Optimizer steps [B] between the policies that made some samples and the one that trains on them."""
    metrics.mean("mismatch/staleness/mean", staleness_B)
    metrics.max("mismatch/staleness/max", staleness_B)
