"""DPOK: a policy gradient on transitions with a penalty at every step towards the model before training.

Source: Fan et al. 2023 (arXiv 2305.16381); here with the kernels of flow matching.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.ddpo import DDPO
from unirl.algorithms.transitions import TransitionRows
from unirl.types.bounds import NonNegative, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DPOK(DDPO):
    """reward_weight * DDPO's loss + kl_coef * KL(policy || reference), both for every transition.

    reward_weight, kl_coef: the paper's alpha (10) and beta (0.01). It adds sums over the N latent elements and over the
        steps; here both terms are means over elements and steps, so the paper's alpha and beta keep their balance and
        the loss is smaller by N times the steps.
    kl_estimator: "exact", the KL of the paper, unless a recipe says otherwise.
    reward_weight = 0 is a pure pull to the reference; kl_coef = 0 is DDPO.
    Everything else: see `DDPO`.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        kl_coef: NonNegative,
        reward_weight: NonNegative = 10.0,
        **options: Any,  # Any: the keywords of DDPO
    ) -> None:
        super().__init__(pipeline, policies, kl_coef=kl_coef, **options)
        self.reward_weight = reward_weight

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """DDPO's loss times the reward's weight; the base adds the penalty."""
        loss_R, metrics = super().surrogate(rows)
        return self.reward_weight * loss_R, metrics
