"""DRO: policy gradient with a quadratic penalty on the log-ratio, which asks for no importance weights.

Sources: Richemond et al. 2024 (arXiv 2405.19107); Kimi Team 2025 (arXiv 2501.12599).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.token_losses import quadratic_penalty_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import NonNegative, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARDRO(TokenAlgorithm):
    """-A log p + beta / 2 (log r)^2 for every token.

    beta: the higher, the closer the policy stays to that before the first update; at log r = A / beta the pull is 0.
    Everything else: see `TokenAlgorithm`.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        beta: NonNegative = 0.05,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.beta = beta

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The penalised policy gradient."""
        loss_M, penalty_M = quadratic_penalty_loss(rows.log_ratio_M, rows.logp_M, rows.advantage_M, beta=self.beta)
        metrics = RowMetrics()
        metrics.mean("dro/penalty", penalty_M)
        return loss_M, metrics
