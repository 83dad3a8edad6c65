"""DRPO: a penalty on how far a token's probability moved, in place of clipping. SPO is its unweighted form.

Source: Yao et al. 2026 (arXiv 2606.09821).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.token_losses import regularised_loss
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.bounds import PositiveOrInf, bounded
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ARDRPO(TokenAlgorithm):
    """-A r + |A| w (r - 1)^2 / (2 epsilon) for every token.

    epsilon: the larger, the weaker the penalty. With w = p_old the gradient's weight is 1 -+ |p - p_old| / epsilon,
        so it stays within 1 +- 1 / epsilon wherever probabilities go.
    penalty_mu_weighted: w is the probability before the first update (DRPO), or 1 (SPO).
    Everything else: see `TokenAlgorithm`; the paper centres advantages on their group without dividing
    (`advantages.preset: dr_grpo`) and sums over tokens (`loss_agg_mode: seq-mean-token-sum-norm`).
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        epsilon: PositiveOrInf = 12.5,
        penalty_mu_weighted: bool = True,
        **options: Any,  # Any: the keywords of TokenAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.epsilon = epsilon
        self.penalty_mu_weighted = penalty_mu_weighted

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The regularised objective."""
        loss_M, measured = regularised_loss(
            rows.log_ratio_M,
            rows.anchor_logp_M,
            rows.advantage_M,
            epsilon=self.epsilon,
            is_weighted=self.penalty_mu_weighted,
        )
        metrics = RowMetrics()
        metrics.mean("drpo/penalty", measured["penalty"])
        metrics.mean("drpo/moved_probability", (rows.logp_M.detach().exp() - rows.anchor_logp_M.exp()).abs())
        return loss_M, metrics
