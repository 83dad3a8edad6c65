"""SAPO: a sigmoid gate around a ratio of 1 in place of a clip, so that no token's gradient ends at an edge.

Source: Gao et al. 2025 (arXiv 2511.20347).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.token_losses import soft_gate_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import Positive, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARSAPO(TokenAlgorithm):
    """-4 / tau sigmoid(tau (r - 1)) A for every token.

    temperature_positive, temperature_negative: tau by the sign of A; the higher, the sooner the gate closes. Tokens of
        bad samples get the higher one: what they lose in probability goes to every other token of the vocabulary.
    Everything else: see `TokenAlgorithm`.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        temperature_positive: Positive = 1.0,
        temperature_negative: Positive = 1.05,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.temperature_positive = temperature_positive
        self.temperature_negative = temperature_negative

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The gated objective."""
        loss_M, gate_M = soft_gate_loss(
            rows.log_ratio_M,
            rows.advantage_M,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )
        metrics = RowMetrics()
        metrics.mean("sapo/gate", gate_M)
        return loss_M, metrics
