"""Flow-GRPO, and DanceGRPO and MixGRPO as recipes of the same class: PPO's clipped surrogate on every transition.

The three differ in what the recipe sets (kernel, stochastic steps, advantages, same-noise groups), not in the loss.
Sources: Flow-GRPO (arXiv 2505.05470), DanceGRPO (arXiv 2505.07818), MixGRPO (arXiv 2507.21802).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics, report_ratio
from unirl.algorithms.losses import clipped_surrogate
from unirl.algorithms.schedules import ClipSchedule, clip_factor
from unirl.algorithms.transitions import TransitionAlgorithm, TransitionRows
from unirl.types.bounds import OpenUnitInterval, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DiffusionGRPO(TransitionAlgorithm):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for every stochastic transition.

    clip_range, clip_range_high: half-widths of the ratio band below and above 1 (the second defaults to the first).
        Calibrated to the kernel's log-prob reduction and, under the mean, to the number of latent elements.
    clip_schedule: constant, linear_decay or cosine_decay over the run.
    Everything else: see `TransitionAlgorithm`.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        clip_range: OpenUnitInterval = 1e-4,
        clip_range_high: OpenUnitInterval | None = None,
        clip_schedule: ClipSchedule = "constant",
        **options: Any,  # Any: the keywords of TransitionAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.clip_low = clip_range
        self.clip_high = clip_range_high if clip_range_high is not None else clip_range
        self.clip_schedule = clip_schedule

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """The clipped objective."""
        return self.clipped(rows.policy.logp_R, rows.anchor_logp_R, rows)

    def clipped(self, logp_R: Tensor, anchor_R: Tensor, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """The clipped objective [R] of these log-probs, with the widths of this moment of the run."""
        factor = clip_factor(self.clip_schedule, rows.progress)
        loss_R, measured = clipped_surrogate(
            logp_R, anchor_R, rows.advantage_R, clip_low=self.clip_low * factor, clip_high=self.clip_high * factor
        )
        metrics = RowMetrics()
        report_ratio(metrics, rows.log_ratio_R)
        metrics.mean("policy/clipfrac_high", measured["clipped_high"])
        metrics.mean("policy/clipfrac_low", measured["clipped_low"])
        return loss_R, metrics
