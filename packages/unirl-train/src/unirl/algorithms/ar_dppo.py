"""DPPO: a mask by how far a token's probability moved, in place of a clip by how far its ratio did.

The ratio of a rare token is large after the smallest step, that of a common one small after a large step.
Source: Qi et al. 2026 (arXiv 2602.04879).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.losses import masked_surrogate
from unirl.algorithms.token_losses import Divergence, binary_divergence
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import PositiveOrInf, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARDPPO(TokenAlgorithm):
    """-A r, and 0 for a token whose divergence exceeds the threshold and whose update would lead further away.

    divergence: "tv" or "kl" of the two outcomes sampled and not sampled, see `token_losses.binary_divergence`.
    threshold: largest divergence; 0.15 is usual for tv, 0.05 for kl.
    Everything else: see `TokenAlgorithm`. The mask is a token's own, so importance_level must be token.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        divergence: Divergence = "tv",
        threshold: PositiveOrInf = 0.15,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        if self.importance_level != "token":
            raise ConfigError(
                f"ARDPPO masks tokens by their own divergence; algorithm.importance_level = {self.importance_level!r} "
                "must be token"
            )
        self.divergence: Divergence = divergence
        self.threshold = threshold

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The masked objective."""
        divergence_M = binary_divergence(rows.logp_M, rows.anchor_logp_M, kind=self.divergence)
        loss_M, measured = masked_surrogate(
            rows.logp_M, rows.anchor_logp_M, rows.advantage_M, divergence_M > self.threshold
        )
        metrics = RowMetrics()
        metrics.mean("dppo/divergence", divergence_M)
        metrics.mean("dppo/masked_positive_fraction", measured["dropped_positive"].float())
        metrics.mean("dppo/masked_negative_fraction", measured["dropped_negative"].float())
        return loss_M, metrics
