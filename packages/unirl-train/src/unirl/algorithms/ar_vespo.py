"""VESPO: a smooth weight of the whole sequence's ratio, highest near 1, in place of a clip.

Source: arXiv 2602.10693; the form is TRL's (`loss_type: vespo`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.token_losses import gamma_weighted_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import NonNegative, Positive, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARVESPO(TokenAlgorithm):
    """-sg(w^k exp(lambda (1 - w))) A log p for every token, w the ratio of its whole sequence.

    power_positive, power_negative: k by the sign of A; the higher, the less sequences count that have become unlikely.
    decay_positive, decay_negative: lambda by the sign of A; the higher, the less those that have become likely. The
        weight is highest at w = k / lambda: of bad sequences above 1, which pushes hardest where they become likely.
    Everything else: see `TokenAlgorithm`. Raises ConfigError for another `importance_level` than token.
    """

    reduces_ratios: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        power_positive: NonNegative = 2.0,
        decay_positive: Positive = 3.0,
        power_negative: NonNegative = 3.0,
        decay_negative: Positive = 2.0,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.positive = (power_positive, decay_positive)
        self.negative = (power_negative, decay_negative)

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The weighted policy gradient."""
        loss_M, weight_M = gamma_weighted_loss(
            rows.log_ratio_M,
            rows.logp_M,
            rows.advantage_M,
            rows.lengths_B,
            positive=self.positive,
            negative=self.negative,
        )
        metrics = RowMetrics()
        metrics.mean("vespo/weight", weight_M)
        return loss_M, metrics
