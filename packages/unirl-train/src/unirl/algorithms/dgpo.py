"""DGPO: a preference between the good and the bad samples of a whole group, instead of a pair.

Legend: B samples, U = B / G units of G samples of one prompt, K noise levels a unit, R rows (unit, level, sample).
Source: Luo et al. 2025 (arXiv 2510.08425).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, report_clipped
from unirl.algorithms.forward_process import ForwardRows, GroupedForwardProcess
from unirl.algorithms.losses import group_preference_loss, velocity_distance
from unirl.types.bounds import Positive, PositiveInt, PositiveOrInf, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DGPO(GroupedForwardProcess):
    """1 / beta softplus(beta mean_g A d) for every unit and level, d how much further than the reference from what
    matching wants.

    samples_per_group: G, the samples of a prompt that train.
    beta: how soon the loss fades as the group becomes ordered; 10 to 100 in the authors' code.
    advantage_clip: half-width of the advantages, None leaves them. Those of a group sum to 0, so that the normaliser of
        its prompt's optimal policy, which is unknown, cancels.
    trust_radius: a row whose velocity is further than this from the reference's (mean squared) has a gradient only
        while its matching error is on the wrong side of the reference's; None for no bound. As in the code of TDM-R1
        (arXiv 2603.07700), which compares the mean distance of a batch instead of each row's.
    Everything else: see `GroupedForwardProcess`. The reference is the policy before training.
    """

    unit_option: ClassVar[str | None] = "samples_per_group"
    requires_centred_advantages: ClassVar[bool] = True
    requires_reference: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        samples_per_group: PositiveInt,
        beta: Positive = 100.0,
        advantage_clip: PositiveOrInf | None = 5.0,
        trust_radius: PositiveOrInf | None = None,
        **options: Any,  # Any: the keywords of GroupedForwardProcess
    ) -> None:
        self.samples_per_unit = samples_per_group
        super().__init__(pipeline, policies, **options)
        self.beta = beta
        self.advantage_clip = advantage_clip
        self.trust_radius = trust_radius

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (unit, level) of the loss."""
        for _, rows in self.forward_rows(micro):
            with torch.no_grad(), self._policies.reference_policy():
                v_reference = rows.velocity()
            yield self.part(micro, rows, v_reference)

    def part(self, micro: MicroBatch, rows: ForwardRows, v_reference: Tensor) -> LossPart:
        """The sum over the units and levels of `rows`, under the weights that the model holds."""
        advantages = micro.advantages
        if self.advantage_clip is not None:
            advantages = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        v = rows.velocity()
        distance_R = velocity_distance(v, rows.target) - velocity_distance(v_reference, rows.target)
        moved_R = velocity_distance(v.detach(), v_reference)
        metrics = RowMetrics()
        if self.trust_radius is not None:
            is_held_R = (moved_R > self.trust_radius) & (advantages[rows.sample_R] * distance_R.detach() < 0)
            distance_R = torch.where(is_held_R, distance_R.detach(), distance_R)
            metrics.mean("dgpo/held_fraction", is_held_R.float())
        distance_UG = distance_R.unflatten(0, (-1, self.samples_per_unit))
        advantage_UG = advantages[rows.sample_R].view_as(distance_UG)
        loss_U = group_preference_loss(distance_UG, advantage_UG, beta=self.beta)
        metrics.mean("policy/loss", loss_U)
        report_clipped(metrics, micro.advantages[rows.sample_R], self.advantage_clip)
        metrics.mean("dgpo/margin", -(advantage_UG * distance_UG).mean(dim=1))
        metrics.mean("dgpo/policy_distance", moved_R)
        penalty_R = self.reference_penalty(v, v_reference if self.reference.is_on else None, metrics, loss=loss_U)
        weight_R = self.row_weights(rows)
        if weight_R is not None:
            loss_U, penalty_R = loss_U * weight_R[:: self.samples_per_unit], penalty_R * weight_R
        return LossPart(loss_U.sum() + penalty_R.sum() / self.samples_per_unit, loss_U.numel(), metrics)

    def row_weights(self, rows: ForwardRows) -> Tensor | None:
        """What the loss of each row weighs [R], the same in a unit; None: all weigh 1."""
        return None
