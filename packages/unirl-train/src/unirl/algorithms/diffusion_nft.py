"""DiffusionNFT: reinforcement on the forward process. No log-prob, no stochastic sampler.

Samples come from an old policy (a named copy that follows the trained one); the loss pulls the velocity towards
good samples and away from bad ones. Legend: B samples, K noise levels per sample, R rows (sample-major B x K).
Source: Zheng et al. 2025 (arXiv 2509.16117).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, report_clipped
from unirl.algorithms.losses import nft_loss, optimality, velocity_distance
from unirl.algorithms.old_policy import OLD, FollowedByOldPolicy
from unirl.types.bounds import Positive, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


def mode_advantages(advantages_B: Tensor, mode: AdvantageMode) -> Tensor:
    """Advantages as the mode sees them: all; max(A, 0); min(A, 0); 1 where A > 0 else 0; sign(A)."""
    if mode == "positive_only":
        return advantages_B.clamp(min=0)
    if mode == "negative_only":
        return advantages_B.clamp(max=0)
    if mode == "one_only":
        return (advantages_B > 0).to(advantages_B.dtype)
    if mode == "binary":
        return advantages_B.sign()
    return advantages_B


@bounded("algorithm")
class DiffusionNFT(FollowedByOldPolicy):
    """Forward-process policy optimisation between the trained policy and the old one.

    beta: how far the implicit positive and negative policies lie from the old one; the first gradient does not
        depend on it. advantage_max: advantages are clipped to +- this and mapped to [0, 1].
    advantage_mode: all, positive_only, negative_only, one_only or binary.
    Everything else, how the old policy follows included: see `FollowedByOldPolicy`.
    """

    rollout_policy: ClassVar[str | None] = OLD
    metric_prefix: ClassVar[str] = "nft"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        beta: Positive = 1.0,
        advantage_max: Positive = 5.0,
        advantage_mode: AdvantageMode = "all",
        adaptive_weight: bool = True,
        **options: Any,  # Any: the keywords of FollowedByOldPolicy
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.beta = beta
        self.advantage_max = advantage_max
        self.advantage_mode: AdvantageMode = advantage_mode
        self.adaptive_weight = adaptive_weight

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (sample, level) of the loss."""
        advantages = mode_advantages(micro.advantages, self.advantage_mode)
        r_B = optimality(advantages, advantage_max=self.advantage_max)
        for _, rows in self.forward_rows(micro):
            v_old = self.old_velocity(rows)
            v_reference = self.reference.evaluate(rows.velocity)
            v_new = rows.velocity()
            r_R = r_B[rows.sample_R]
            branches = nft_loss(
                v_new,
                v_old,
                rows.x_t,
                rows.x0,
                rows.sigma_R,
                r_R,
                beta=self.beta,
                advantage_max=self.advantage_max,
                adaptive_weight=self.adaptive_weight,
            )
            metrics = RowMetrics()
            report_clipped(metrics, advantages[rows.sample_R], self.advantage_max)
            metrics.mean("nft/positive_loss", branches.positive_R)
            metrics.mean("nft/negative_loss", branches.negative_R)
            metrics.mean("nft/optimality_mean", r_R)
            metrics.mean("nft/policy_distance", velocity_distance(v_new, v_old))
            metrics.mean("policy/loss", branches.loss_R)
            loss_R = branches.loss_R + self.reference_penalty(v_new, v_reference, metrics, loss=branches.loss_R)
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)
