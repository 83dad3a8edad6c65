"""CISPO: importance weights that are cut off instead of tokens, so that every token keeps its gradient.

Source: MiniMax 2025 (arXiv 2506.13585).
"""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.losses import bounded_ratio
from unirl.algorithms.token_losses import truncated_ratio_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import Bounds, UnitInterval, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARCISPO(TokenAlgorithm):
    """-sg(clamp(r, ratio_min, ratio_max)) A log p for every token.

    ratio_max: largest importance weight; ratio_min: smallest one, 0 for none. With both at 1 it is REINFORCE.
    Everything else: see `TokenAlgorithm`.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        ratio_max: Annotated[float, Bounds(ge=1, allow_inf=True)] = 5.0,
        ratio_min: UnitInterval = 0.0,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.ratio_max = ratio_max
        self.ratio_min = ratio_min

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The truncated policy gradient."""
        loss_M = truncated_ratio_loss(
            rows.log_ratio_M, rows.logp_M, rows.advantage_M, ratio_min=self.ratio_min, ratio_max=self.ratio_max
        )
        ratio_M = bounded_ratio(rows.log_ratio_M.detach())
        metrics = RowMetrics()
        metrics.mean("policy/clipfrac_high", (ratio_M > self.ratio_max).float())
        metrics.mean("policy/clipfrac_low", (ratio_M < self.ratio_min).float())
        return loss_M, metrics
