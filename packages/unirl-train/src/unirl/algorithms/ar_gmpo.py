"""GMPO: the geometric mean of a sequence's clipped ratios, which no single token can move far.

Source: Zhao et al. 2025 (arXiv 2507.20673).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.token_losses import geometric_mean_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import Positive, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARGMPO(TokenAlgorithm):
    """-A exp(mean over the sequence of the clipped log-ratios of its tokens).

    clip_log_ratio, clip_log_ratio_high: bounds of log r below and above 0 (the second defaults to the first); the paper
        takes 0.4, wider than other clips, since the mean tames what is left.
    Everything else: see `TokenAlgorithm`; the paper averages over sequences (`loss_agg_mode: seq-mean-token-mean`).
    Raises ConfigError for another `importance_level` than token: it takes the mean itself.
    """

    reduces_ratios: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        clip_log_ratio: Positive = 0.4,
        clip_log_ratio_high: Positive | None = None,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.clip_low = clip_log_ratio
        self.clip_high = clip_log_ratio if clip_log_ratio_high is None else clip_log_ratio_high

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The objective of geometric means."""
        loss_M, measured = geometric_mean_loss(
            rows.log_ratio_M, rows.advantage_M, rows.lengths_B, clip_low=self.clip_low, clip_high=self.clip_high
        )
        metrics = RowMetrics()
        metrics.mean("policy/clipfrac_high", measured["clipped_high"])
        metrics.mean("policy/clipfrac_low", measured["clipped_low"])
        return loss_M, metrics
