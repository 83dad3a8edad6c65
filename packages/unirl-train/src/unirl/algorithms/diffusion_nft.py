"""DiffusionNFT: reinforcement on the forward process. No log-prob, no stochastic sampler.

Samples come from an old policy (a named copy that follows the trained one); the loss pulls the velocity towards
good samples and away from bad ones. Legend: B samples, K noise levels per sample, R rows (sample-major B x K).
Source: Zheng et al. 2025 (arXiv 2509.16117).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, report_clipped
from unirl.algorithms.forward_process import ForwardRows
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


@dataclass(frozen=True)
class Velocities:
    """What three policies answer at R noised samples, [R, ...] float32 each."""

    new: Tensor
    """The trained policy's, with gradients."""
    old: Tensor
    reference: Tensor | None
    """None where no penalty asks for it."""


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
        for _, rows in self.forward_rows(micro):
            velocities, metrics = self.velocities(rows), RowMetrics()
            policy_R, penalty_R = self.loss_of(velocities, rows, micro.advantages[rows.sample_R], metrics)
            metrics.mean("policy/loss", policy_R)
            loss_R = policy_R + penalty_R
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def velocities(self, rows: ForwardRows) -> Velocities:
        """Those of the trained policy, with gradients, of the old one and of the reference."""
        v_old = self.old_velocity(rows)
        v_reference = self.reference.evaluate(rows.velocity)
        return Velocities(rows.velocity(), v_old, v_reference)

    def loss_of(
        self,
        v: Velocities,
        rows: ForwardRows,
        advantage_R: Tensor,
        metrics: RowMetrics,
        place_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and penalty per row, [R] each: means over the elements that `v` and `rows` hold.

        place_weight: of the elements in the loss, see `nft_loss`; the penalty weighs them alike.
        """
        advantage_R = mode_advantages(advantage_R, self.advantage_mode)
        r_R = optimality(advantage_R, advantage_max=self.advantage_max)
        branches = nft_loss(
            v.new,
            v.old,
            rows.x_t,
            rows.x0,
            rows.sigma_R,
            r_R,
            beta=self.beta,
            advantage_max=self.advantage_max,
            adaptive_weight=self.adaptive_weight,
            place_weight=place_weight,
        )
        report_clipped(metrics, advantage_R, self.advantage_max)
        metrics.mean("nft/positive_loss", branches.positive_R)
        metrics.mean("nft/negative_loss", branches.negative_R)
        metrics.mean("nft/optimality_mean", r_R)
        metrics.mean("nft/policy_distance", velocity_distance(v.new, v.old))
        return branches.loss_R, self.reference_penalty(v.new, v.reference, metrics, loss=branches.loss_R)
