"""Flow-DPPO: the trust region is the exact divergence of two Gaussian transitions instead of a band of the ratio.

Source: Ping et al. 2026 (arXiv 2606.11025).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.base import RowMetrics, report_ratio
from unirl.algorithms.losses import masked_surrogate
from unirl.algorithms.transitions import TransitionAlgorithm, TransitionRows
from unirl.sde.likelihood import transition_kl
from unirl.types.bounds import NonNegativeOrInf, PositiveOrInf, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class FlowDPPO(TransitionAlgorithm):
    """-A r for every transition, without a clip; rows with K >= threshold that would move further away are dropped.

    threshold: of K = mean((mean - mean_old)^2) / (2 s^2), nats per latent element whatever the kernel's reduction, with
        the standard deviation s that the kernel drew with. Published: 1e-7 to 1e-5 (Flow), 1e-6 (CPS), at 65,536
        elements; K grows with 1 / N at the same number of nats. 0 keeps corrective moves alone, .inf keeps all rows.
    advantage_clip: None, as published: nothing but the mask limits an update.
    Everything else: see `TransitionAlgorithm`.
    """

    keeps_anchor_means: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        threshold: NonNegativeOrInf = 1e-5,
        advantage_clip: PositiveOrInf | None = None,
        **options: Any,  # Any: the keywords of TransitionAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, advantage_clip=advantage_clip, **options)
        self.threshold = threshold

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """The masked objective; dropped rows count in the mean."""
        kl_R = old_policy_kl(rows)
        metrics = RowMetrics()
        is_outside_R = self.outside(kl_R, rows, metrics)
        loss_R, dropped = masked_surrogate(
            rows.policy.logp_R, rows.anchor_logp_R, rows.advantage_R, is_outside_R.to(kl_R.device)
        )
        report_ratio(metrics, rows.log_ratio_R)
        metrics.mean("dppo/kl_mean", kl_R)
        metrics.max("dppo/kl_max", kl_R)
        metrics.mean("dppo/kl_mask_fraction", is_outside_R)
        metrics.mean("dppo/masked_fraction", dropped["dropped_positive"] | dropped["dropped_negative"])
        metrics.mean("dppo/masked_positive_fraction", dropped["dropped_positive"])
        metrics.mean("dppo/masked_negative_fraction", dropped["dropped_negative"])
        return loss_R, metrics

    def outside(self, kl_R: Tensor, rows: TransitionRows, metrics: RowMetrics) -> Tensor:
        """bool [R]: which rows have left the trust region, given K."""
        return kl_R >= self.threshold


def old_policy_kl(rows: TransitionRows) -> Tensor:
    """K of every row to the policy before the first update, [R], nats per latent element, without gradients.

    Raises ConfigError for a transition without noise, ContractError if the anchor holds no means.
    """
    if rows.anchor_mean is None:
        raise ContractError("a divergence mask needs the transition means of the anchor")
    if not bool((rows.policy.std_R > 0).all()):
        raise ConfigError(
            "a transition without noise has no divergence to mask by (CPS adds none at the last step). "
            "Leave the last step out of sampling.scheduler."
        )
    return transition_kl(rows.policy.mean.detach(), rows.anchor_mean, rows.policy.std_R)
