"""GRPO-Guard: a ratio that is centred on 1 and equally wide at every step, so that a clip means the same everywhere.

With y = mean_old + s eps the log-ratio of a Gaussian transition is mean(eps d) / s - K, where d is the change of the
mean, s the standard deviation and K = mean(d^2) / (2 s^2). So (log r + K) s = mean(eps d) has mean 0 and variance
mean(d^2) / N whatever s is. Source: Wang et al. 2025 (arXiv 2510.22319).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.losses import MAX_LOG_RATIO, bounded_ratio
from unirl.algorithms.transitions import TransitionRows
from unirl.sde.likelihood import transition_kl
from unirl.types.bounds import OpenUnitInterval, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class GRPOGuard(DiffusionGRPO):
    """DiffusionGRPO on the normalised ratio exp((log r + K) s), each step's loss divided by its length |d sigma|.

    clip_range: half-width of the band of the normalised ratio; published 2e-6 to 4e-6 at 512 x 512. At the same number
        of clipped rows it is about s times the clip of DiffusionGRPO.
    reweight_gradient: divide the surrogate (not the penalty towards the reference) by sigma - sigma_next.
    Needs a Flow or Dance kernel whose log-probs are means over the elements (reduction: mean): CPS's log-prob is no
    density, and a sum over N elements is N times what the identity above holds for.
    """

    keeps_anchor_means: ClassVar[bool] = True
    requires_gaussian_mean: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        clip_range: OpenUnitInterval = 4e-6,
        reweight_gradient: bool = True,
        **options: Any,  # Any: the keywords of DiffusionGRPO
    ) -> None:
        super().__init__(pipeline, policies, clip_range=clip_range, **options)
        self.reweight_gradient = reweight_gradient

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """The clipped objective of the normalised ratio. Raises ConfigError for a kernel without one."""
        log_ratio_R = normalised_log_ratio(rows)
        loss_R, metrics = self.clipped(log_ratio_R, torch.zeros_like(log_ratio_R), rows)
        ratio_R = bounded_ratio(log_ratio_R.detach())
        metrics.mean("guard/ratio_mean", ratio_R)
        metrics.max("guard/ratio_max_abs_dev", (ratio_R - 1).abs())
        metrics.mean("guard/ratio_bounded_fraction", log_ratio_R > MAX_LOG_RATIO)
        if self.reweight_gradient:
            loss_R = loss_R / rows.delta_sigma_R
        return loss_R, metrics


def normalised_log_ratio(rows: TransitionRows) -> Tensor:
    """(log r + K) s = mean(eps (mean - mean_old)), [R], with gradients.

    Raises ConfigError for the CPS kernel, ContractError if the anchor holds no means.
    """
    if rows.policy.q_R is None:
        raise ConfigError(
            "GRPOGuard needs the density of a Flow or Dance kernel; CPS has none. "
            "Set pipeline.strategy._target_: unirl.sde.kernels.FlowSDEStrategy."
        )
    if rows.anchor_mean is None:
        raise ContractError("GRPOGuard needs the transition means of the anchor")
    kl_R = transition_kl(rows.policy.mean, rows.anchor_mean, rows.policy.std_R)
    return (rows.log_ratio_R + kl_R) * rows.policy.std_R
