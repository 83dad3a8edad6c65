"""Policy gradient on denoising transitions: Flow-GRPO, and DanceGRPO and MixGRPO as recipes of the same class.

The three differ in what the recipe sets (kernel, stochastic steps, advantages, same-noise groups), not in the
loss. Legend: B samples, S stochastic steps, R rows (sample-major pairs of the two).
Sources: Flow-GRPO (arXiv 2505.05470), DanceGRPO (arXiv 2505.07818), MixGRPO (arXiv 2507.21802).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    StageAlgorithm,
    check_rows_per_forward,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.kl import AdaptiveKL, adapted_coefficient
from unirl.algorithms.losses import clipped_surrogate
from unirl.algorithms.schedules import CLIP_SCHEDULES, clip_factor
from unirl.sde.likelihood import transition_kl
from unirl.sde.loop import transition_rows
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols import DiffusionPipeline, PolicyStore, TransitionStats
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

KLEstimator = Literal["exact", "flow_grpo"]


class DiffusionGRPO(StageAlgorithm):
    """Clipped surrogate over every stochastic transition, with an optional penalty towards a reference policy.

    clip_range, clip_range_high: half-widths of the ratio band below and above 1 (the second defaults to the first).
        Calibrated to the kernel's log-prob reduction and, under the mean, to the number of latent elements.
    clip_schedule: constant, linear_decay or cosine_decay over the run.
    advantage_clip: advantages are clamped to +- this before they multiply the ratio; None leaves them.
    old_logp_source: "replay" takes the anchor at the very rows of training (ratio exactly 1 at the first update);
        "rollout" trusts the engine's log-probs.
    kl_coef: weight of the penalty; 0 switches the reference off. kl_estimator: "exact" is the Gaussian transition
        KL per element, "flow_grpo" the published code's form, which weights each step by |d sigma|.
    adaptive_kl: drives kl_coef towards a target.
    rows_per_forward: memory knob; the B x S rows of a micro-batch are replayed in chunks of this many.
    """

    requires_sde: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        clip_range: float = 1e-4,
        clip_range_high: float | None = None,
        clip_schedule: str = "constant",
        advantage_clip: float | None = 5.0,
        old_logp_source: Literal["rollout", "replay"] = "replay",
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "exact",
        adaptive_kl: AdaptiveKL | None = None,
        rows_per_forward: int | None = None,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if old_logp_source not in ("rollout", "replay"):
            raise ConfigError(f"algorithm.old_logp_source = {old_logp_source!r} must be 'rollout' or 'replay'")
        if kl_estimator not in ("exact", "flow_grpo"):
            raise ConfigError(f"algorithm.kl_estimator = {kl_estimator!r} must be 'exact' or 'flow_grpo'")
        if clip_schedule not in CLIP_SCHEDULES:
            raise ConfigError(f"algorithm.clip_schedule = {clip_schedule!r} must be one of {', '.join(CLIP_SCHEDULES)}")
        for name, value in (("clip_range", clip_range), ("clip_range_high", clip_range_high)):
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"algorithm.{name} = {value} must lie in (0, 1)")
        if kl_coef < 0:
            raise ConfigError(f"algorithm.kl_coef = {kl_coef} must be at least 0")
        if adaptive_kl is not None and kl_coef == 0:
            raise ConfigError("algorithm.adaptive_kl needs a starting algorithm.kl_coef above 0")
        if advantage_clip is not None and advantage_clip <= 0:
            raise ConfigError(f"algorithm.advantage_clip = {advantage_clip} must be above 0, or null for no clipping")
        check_rows_per_forward(rows_per_forward)
        self._pipeline = pipeline
        self._policies = policies
        self.clip_low = clip_range
        self.clip_high = clip_range_high if clip_range_high is not None else clip_range
        self.clip_schedule = clip_schedule
        self.advantage_clip = advantage_clip
        self.uses_anchor = old_logp_source == "replay"
        self.kl_coef = kl_coef
        self.kl_estimator: KLEstimator = kl_estimator
        self.adaptive_kl = adaptive_kl
        self.rows_per_forward = rows_per_forward
        self._params = params

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times stochastic steps."""
        segment = track.segment
        if not isinstance(segment, LatentSegment) or not segment.sde_indices:
            raise ContractError("DiffusionGRPO needs stochastic steps: set sampling.eta > 0 and sampling.scheduler")
        return segment.batch_size * len(segment.sde_indices)

    def anchor(self, micro: MicroBatch) -> tuple[dict[str, Tensor], RowMetrics]:
        """Replayed log-probs [B, S] under the policy before the first update, and their gap to the rollout's."""
        self.num_terms(micro.track)  # refuses a track without stochastic steps
        segment = micro.segment
        sample_R, step_R = transition_rows(segment.batch_size, segment.sde_indices)
        metrics = RowMetrics()
        with torch.no_grad():
            parts = [
                self._replay(micro, sample_R[rows], step_R[rows]).logp_R
                for rows in row_chunks(sample_R.numel(), self.rows_per_forward)
            ]
        logp_BS = torch.cat(parts).view(segment.batch_size, -1)
        if segment.sde_logp is not None:
            gap_BS = (logp_BS - segment.sde_logp).abs()
            metrics.mean("mismatch/logp_absdiff/mean", gap_BS)
            metrics.max("mismatch/logp_absdiff/max", gap_BS)
            for column, step in enumerate(segment.sde_indices):
                metrics.mean(f"mismatch/logp_absdiff/ts_{step}", gap_BS[:, column])
        return {"logp": logp_BS}, metrics

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over rows of surrogate + kl_coef * KL."""
        segment = micro.segment
        anchor_BS = self._anchor_logp(micro)
        sample_R, step_R = transition_rows(segment.batch_size, segment.sde_indices)
        advantages = micro.advantages
        if self.advantage_clip is not None:
            advantages = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        factor = clip_factor(self.clip_schedule, micro.progress)
        for rows in row_chunks(sample_R.numel(), self.rows_per_forward):
            samples, steps = sample_R[rows], step_R[rows]
            # The reference runs first: it swaps parameter values, which a pending backward would not survive.
            reference = self._reference(micro, samples, steps) if self.kl_coef > 0 else None
            replay = self._replay(micro, samples, steps)
            loss_R, measured = clipped_surrogate(
                replay.logp_R,
                anchor_BS.reshape(-1)[rows],
                advantages[samples],
                clip_low=self.clip_low * factor,
                clip_high=self.clip_high * factor,
            )
            metrics = RowMetrics()
            metrics.mean("policy/ratio_mean", measured["ratio"])
            metrics.max("policy/ratio_max_abs_dev", (measured["ratio"] - 1).abs())
            metrics.mean("policy/clipfrac_high", measured["clipped_high"])
            metrics.mean("policy/clipfrac_low", measured["clipped_low"])
            metrics.mean("policy/approx_kl", measured["approx_kl"])
            metrics.mean("policy/loss", loss_R)
            if reference is not None:
                kl_R = self._kl(replay, reference)
                metrics.mean("policy/reference_kl", kl_R)
                loss_R = loss_R + self.kl_coef * kl_R
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Adapt the penalty's coefficient to the measured KL."""
        if self.adaptive_kl is not None and "policy/reference_kl" in metrics:
            self.kl_coef = adapted_coefficient(
                self.kl_coef,
                metrics["policy/reference_kl"],
                target=self.adaptive_kl.target,
                horizon=self.adaptive_kl.horizon,
                num_samples=num_samples,
            )
            metrics["policy/kl_coef"] = self.kl_coef

    def state_dict(self) -> dict[str, float]:
        """The adapted coefficient."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the adapted coefficient."""
        self.kl_coef = state["kl_coef"]

    def _anchor_logp(self, micro: MicroBatch) -> Tensor:
        if self.uses_anchor:
            return micro.anchor["logp"]
        logp_BS = micro.segment.sde_logp
        if logp_BS is None:
            raise ContractError(
                "old_logp_source = 'rollout' but the engine returned no log-probs. Use old_logp_source: replay."
            )
        return logp_BS

    def _replay(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> TransitionStats:
        params = sampled_with(micro.segment, self._params)
        return self._pipeline.replay(micro.track.conditions, micro.segment, sample_R, step_R, params)

    def _reference(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> TransitionStats:
        with torch.no_grad(), self._policies.reference_policy():
            return self._replay(micro, sample_R, step_R)

    def _kl(self, replay: TransitionStats, reference: TransitionStats) -> Tensor:
        if self.kl_estimator == "exact":
            if not bool((replay.std_R > 0).all()):
                raise ConfigError(
                    "a transition without noise has no KL to a reference (CPS adds none at the last step). "
                    "Leave the last step out of sampling.scheduler, or set algorithm.kl_coef: 0."
                )
            return transition_kl(replay.mean, reference.mean, replay.std_R)
        if replay.q_R is None:
            raise ConfigError("kl_estimator = 'flow_grpo' needs a Flow or Dance kernel; use kl_estimator: exact")
        return transition_kl(replay.mean, reference.mean, replay.q_R)
