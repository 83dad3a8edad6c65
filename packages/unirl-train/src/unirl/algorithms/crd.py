"""CRD (centred reward distillation): the policy's own measure of its samples is regressed onto their rewards.

The optimum of a reward with a KL to the old policy satisfies log p / p_old = reward / beta + a constant of the prompt;
matching errors stand for the log-probs, and centring within the prompt removes the constant.
Legend: B samples, U = B / G units of G samples of one prompt, K noise levels a unit, R rows (unit, level, sample).
Source: Zhu et al. 2026 (arXiv 2603.14128).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, report_clipped
from unirl.algorithms.forward_process import GroupedForwardProcess
from unirl.algorithms.losses import centred_reward_loss, implicit_reward, optimality, velocity_distance
from unirl.algorithms.old_policy import FollowedByOldPolicy
from unirl.algorithms.schedules import OldPolicyDecay
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class CRD(FollowedByOldPolicy, GroupedForwardProcess):
    """(A_max / beta) mean_g (beta (r - mean r) - (R - mean R))^2 for every unit and level.

    r is the implicit reward over the old policy, R the optimality in [0, 1], A_max `advantage_max`.

    samples_per_group: G, the samples of a prompt that train.
    beta: scale of the implicit reward. advantage_max: advantages are clipped to +- this and mapped to R.
    adaptive_weight: whether matching errors are divided by their own size, see `implicit_reward`.
    Rollouts are the trained policy's, so that the old one may part from it.
    Everything else: see `FollowedByOldPolicy` and `GroupedForwardProcess`.
    """

    metric_prefix: ClassVar[str] = "crd"
    default_decay: ClassVar[OldPolicyDecay] = OldPolicyDecay(start=0.25, rate=0.005, cap=0.999)
    unit_option: ClassVar[str | None] = "samples_per_group"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        samples_per_group: PositiveInt,
        beta: Positive = 1.0,
        advantage_max: Positive = 5.0,
        adaptive_weight: bool = True,
        **options: Any,  # Any: the keywords of FollowedByOldPolicy
    ) -> None:
        self.samples_per_unit = samples_per_group
        super().__init__(pipeline, policies, **options)
        self.beta = beta
        self.advantage_max = advantage_max
        self.adaptive_weight = adaptive_weight

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (unit, level) of the loss."""
        reward_B = optimality(micro.advantages, advantage_max=self.advantage_max)
        for _, rows in self.forward_rows(micro):
            v_old = self.old_velocity(rows)
            v_reference = self.reference.evaluate(rows.velocity)
            v = rows.velocity()
            implicit_R = implicit_reward(v, v_old, rows.target, adaptive_weight=self.adaptive_weight)
            implicit_UG = implicit_R.unflatten(0, (-1, self.samples_per_unit))
            reward_UG = reward_B[rows.sample_R].view_as(implicit_UG)
            loss_U = centred_reward_loss(implicit_UG, reward_UG, beta=self.beta, advantage_max=self.advantage_max)
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_U)
            report_clipped(metrics, micro.advantages[rows.sample_R], self.advantage_max)
            metrics.mean("crd/implicit_reward", implicit_R)
            metrics.mean("crd/implicit_reward_std", implicit_UG.std(dim=1, correction=0))
            metrics.mean("crd/policy_distance", velocity_distance(v.detach(), v_old))
            penalty_R = self.reference_penalty(v, v_reference, metrics, loss=loss_U)
            yield LossPart(loss_U.sum() + penalty_R.sum() / self.samples_per_unit, loss_U.numel(), metrics)
