"""AWM (advantage weighted matching): a policy gradient whose log-prob is minus the flow-matching error.

No stochastic sampler is needed: a clean sample is noised, and the ratio compares how well the policy and the anchor
explain it. Legend: B samples, K noise levels per sample, R rows (sample-major B x K).
Source: Xue et al. 2025 (arXiv 2509.25050).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    report_clipped,
    report_ratio,
)
from unirl.algorithms.forward_process import ForwardProcessAlgorithm, ForwardRows
from unirl.algorithms.losses import clipped_surrogate, matching_logp, velocity_distance
from unirl.algorithms.old_logp import REPLAYED
from unirl.types.bounds import NonNegative, PositiveFraction, PositiveOrInf, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
AVERAGE = "ema"


@bounded("algorithm")
class AWM(ForwardProcessAlgorithm):
    """max(-A r, -A clip(r, 1 - clip, 1 + clip)) with log r the change of the weighted matching error since the anchor.

    clip_range: half-width of the ratio band; the authors' code has 1, which only bounds the ratio from above.
    advantage_clip: half-width of the advantages, None leaves them.
    weighting, ghuber_power: how the error counts at a noise level, see `matching_logp`.
    ema_kl_coef: penalty mean (v - v_ema)^2 towards the moving average that backend.ema keeps; 0 switches it off.
    Everything else, the penalty towards the reference included: see `ForwardProcessAlgorithm`.
    """

    uses_anchor = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        clip_range: PositiveFraction = 1.0,
        advantage_clip: PositiveOrInf | None = 5.0,
        weighting: Weighting = "ghuber",
        ghuber_power: PositiveFraction = 0.25,
        ema_kl_coef: NonNegative = 0.0,
        **options: Any,  # Any: the keywords of ForwardProcessAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.clip_range = clip_range
        self.advantage_clip = advantage_clip
        self.weighting: Weighting = weighting
        self.ghuber_power = ghuber_power
        self.ema_kl_coef = ema_kl_coef

    @property
    def old_logp(self) -> str:
        """There is no rollout's to take."""
        return REPLAYED

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """The matching log-probs [B, K] of the policy before the first update."""
        with torch.no_grad():
            parts = [self._logp(rows, rows.velocity()) for _, rows in self.forward_rows(micro)]
        return {"logp": torch.cat(parts).view(micro.track.batch_size, -1)}

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (sample, level) of surrogate and penalties."""
        anchor_R = micro.anchor["logp"].flatten() if "logp" in micro.anchor else None
        advantages = micro.advantages
        if self.advantage_clip is not None:
            advantages = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        for place, rows in self.forward_rows(micro):
            v_reference = self.reference.evaluate(rows.velocity)
            v_average = self._average(rows.velocity)
            v = rows.velocity()
            logp_R = self._logp(rows, v)
            old_R = logp_R.detach() if anchor_R is None else anchor_R[place]
            loss_R, measured = clipped_surrogate(
                logp_R,
                old_R,
                advantages[rows.sample_R],
                clip_low=self.clip_range,
                clip_high=self.clip_range,
            )
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_R)
            report_clipped(metrics, micro.advantages[rows.sample_R], self.advantage_clip)
            report_ratio(metrics, logp_R - old_R)
            metrics.mean("policy/clipfrac_high", measured["clipped_high"])
            metrics.mean("policy/clipfrac_low", measured["clipped_low"])
            metrics.mean("awm/logp_mean", logp_R)
            loss_R = loss_R + self.reference_penalty(v, v_reference, metrics, loss=loss_R)
            if v_average is not None:
                distance_R = velocity_distance(v, v_average)
                metrics.mean("awm/ema_kl", distance_R)
                loss_R = loss_R + self.ema_kl_coef * distance_R
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def _logp(self, rows: ForwardRows, v: Tensor) -> Tensor:
        return matching_logp(v, rows.target, rows.sigma_R, weighting=self.weighting, power=self.ghuber_power)

    def _average(self, velocity: Callable[[], Tensor]) -> Tensor | None:
        if self.ema_kl_coef == 0:
            return None
        with torch.no_grad(), self._policies.using_policy(AVERAGE):
            return velocity()
