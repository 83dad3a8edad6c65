"""GRPO on tokens, and its relatives as recipes of the same class: PPO's clipped surrogate on every generated token.

They differ in what the recipe sets: GRPO (arXiv 2402.03300; loss_agg_mode: seq-mean-token-mean), Dr. GRPO (arXiv
2503.20783; seq-mean-token-sum-norm, advantages.preset: dr_grpo), DAPO (arXiv 2503.14476; token-mean, clip_range_high,
selection.dynamic_sampling), GSPO (arXiv 2507.18071; importance_level: sequence), RLOO (arXiv 2402.14740;
advantages.preset: rloo), LUSPO (arXiv 2602.05261; GSPO with losses summed over tokens), MaxRL (arXiv 2602.02710;
advantages.preset: maxrl), REINFORCE++ (arXiv 2501.03262; advantages.preset: reinforce_pp).
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.losses import clipped_surrogate
from unirl.algorithms.schedules import ClipSchedule, clip_factor
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import Bounds, Positive, PositiveFraction, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARGRPO(TokenAlgorithm):
    """max(-A min(r, cap), -A clip(r, 1 - low, 1 + high)) for every token.

    clip_range, clip_range_high: half-widths of the ratio band below and above 1 (the second defaults to the first). 0.2
        is usual for tokens, 3e-4 for sequences, whose ratio is a mean over tokens.
    ratio_cap: upper bound of the ratio where the advantage is negative (dual clip), above 1 + clip_range_high.
    clip_schedule: constant, linear_decay or cosine_decay over the run.
    Everything else: see `TokenAlgorithm`.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        clip_range: PositiveFraction = 0.2,
        clip_range_high: Positive | None = None,
        ratio_cap: Annotated[float, Bounds(gt=1)] | None = None,
        clip_schedule: ClipSchedule = "constant",
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        clip_high = clip_range if clip_range_high is None else clip_range_high
        if ratio_cap is not None and ratio_cap <= 1 + clip_high:
            raise ConfigError(
                f"algorithm.ratio_cap = {ratio_cap} must exceed 1 + the upper clip = {1 + clip_high:g}, which would "
                "otherwise never bind. Set null for no cap."
            )
        self.clip_low = clip_range
        self.clip_high = clip_high
        self.ratio_cap = math.inf if ratio_cap is None else ratio_cap
        self.clip_schedule = clip_schedule

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The clipped objective."""
        factor = clip_factor(self.clip_schedule, rows.progress)
        loss_M, measured = clipped_surrogate(
            rows.log_ratio_M,
            torch.zeros_like(rows.log_ratio_M),
            rows.advantage_M,
            clip_low=self.clip_low * factor,
            clip_high=self.clip_high * factor,
            ratio_cap=self.ratio_cap,
        )
        metrics = RowMetrics()
        metrics.mean("policy/clipfrac_high", measured["clipped_high"])
        metrics.mean("policy/clipfrac_low", measured["clipped_low"])
        return loss_M, metrics
