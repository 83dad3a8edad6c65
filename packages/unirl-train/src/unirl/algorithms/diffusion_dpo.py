"""Diffusion-DPO: of two samples of a prompt, the better one is to become likelier relative to a reference.

Online the pairs are the best and the worst sample of a group (`selection.best_of: 2`), offline they come from a file
(`OfflineRolloutEngine`); the algorithm sees two samples and their advantages either way.
Legend: B samples, P = B / 2 pairs, K noise levels a pair, R rows (pair, level, sample).
Source: Wallace et al. 2023 (arXiv 2311.12908).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.forward_process import ForwardRows, GroupedForwardProcess
from unirl.algorithms.losses import preference_loss, velocity_distance
from unirl.types.bounds import Positive, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DiffusionDPO(GroupedForwardProcess):
    """-log sigmoid(-beta / 2 (d_winner - d_loser)), d how much further than the reference from what matching wants.

    The winner is the sample with the higher advantage; a tie adds nothing
    to the gradient and counts in the mean all the same.
    beta: strength of the pull to the reference; 2000 to 5000 in the paper, where d is a mean over latent elements.
    Everything else: see `ForwardProcessAlgorithm`. The reference is the policy before training.
    """

    samples_per_unit = 2
    requires_reference: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        beta: Positive = 2000.0,
        **options: Any,  # Any: the keywords of ForwardProcessAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.beta = beta

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (pair, level) of the loss."""
        for _, rows in self.forward_rows(micro):
            with torch.no_grad(), self._policies.reference_policy():
                v_reference = rows.velocity()
            v = rows.velocity()
            distance_R = velocity_distance(v, rows.target) - velocity_distance(v_reference, rows.target)
            sign_P = pair_signs(micro.advantages, rows)
            margin_P = sign_P * (distance_R[0::2] - distance_R[1::2])
            is_pair_P = sign_P != 0
            loss_P = torch.where(is_pair_P, preference_loss(margin_P, beta=self.beta), torch.zeros_like(margin_P))
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_P)
            metrics.mean("dpo/tie_fraction", (~is_pair_P).float())
            metrics.mean("dpo/accuracy", (margin_P < 0)[is_pair_P].float())
            metrics.mean("dpo/margin", -margin_P[is_pair_P])
            metrics.mean("dpo/winner_distance", torch.where(sign_P > 0, distance_R[0::2], distance_R[1::2])[is_pair_P])
            metrics.mean("dpo/policy_distance", velocity_distance(v.detach(), v_reference))
            penalty_R = self.reference_penalty(v, v_reference if self.reference.is_on else None, metrics, loss=loss_P)
            yield LossPart(loss_P.sum() + 0.5 * penalty_R.sum(), loss_P.numel(), metrics)


def pair_signs(advantages_B: Tensor, rows: ForwardRows) -> Tensor:
    """Sign per pair of rows, [R / 2]: 1 where the first sample wins, -1 where the second does, 0 for a tie."""
    return (advantages_B[rows.sample_R[0::2]] - advantages_B[rows.sample_R[1::2]]).sign()
