"""GRPO on the actions of episodes: PPO's clipped surrogate on every term of every decision.

A term is a stochastic step of a flow over a chunk of moves, its whole chain, or a token (`unirl.types.actions`). The
advantage of an episode, compared with others from the same start, is that of all its decisions.
Sources: pi_RL (arXiv 2510.25889), its ratios per flow step; SimpleVLA-RL's GRPO over episodes.
Legend: B episodes, N decisions of a micro-batch, n of them in a forward, L terms of a decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    report_clipped,
    report_ratio,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.losses import clipped_surrogate
from unirl.algorithms.old_logp import OldLogpSource, RatioAlgorithm, log_linear_logp
from unirl.algorithms.reference import KLEstimator, ReferenceKL
from unirl.algorithms.schedules import ClipSchedule, clip_factor
from unirl.types.actions import ActionSegment
from unirl.types.bounds import NonNegative, Positive, PositiveFraction, PositiveInt, PositiveOrInf, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import ActionPipeline, ActionStats
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import ActionSamplingParams


def action_segment(track: RolloutTrack) -> ActionSegment:
    """The track's episodes. Raises ContractError for another kind of segment."""
    if not isinstance(track.segment, ActionSegment):
        raise ContractError(f"expected episodes, the track holds {type(track.segment).__name__}")
    return track.segment


@bounded("algorithm")
class ActionGRPO(RatioAlgorithm):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for every term of every decision; the mean over all terms.

    clip_range, clip_range_high: half-widths of the ratio band below and above 1 (the second defaults to the first).
    clip_schedule: constant, linear_decay or cosine_decay over the run.
    advantage_clip: advantages are clamped to +- this; None leaves them.
    old_logp_source: see `RatioAlgorithm`.
    entropy_coef: weight of the entropy of tokens or of learned noise, which is taken off the loss; other flows know
        none.
    kl_coef, kl_estimator, adaptive_kl: penalty towards the reference, see `ReferenceKL`; k1, k2 or k3.
    decisions_per_forward: memory knob; the decisions of a micro-batch are replayed in chunks of this many.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.action_rules"
    trains_actions: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: ActionPipeline,
        policies: PolicyStore,
        *,
        clip_range: PositiveFraction = 0.2,
        clip_range_high: Positive | None = None,
        clip_schedule: ClipSchedule = "constant",
        advantage_clip: PositiveOrInf | None = None,
        old_logp_source: OldLogpSource = "auto",
        entropy_coef: NonNegative = 0.0,
        kl_coef: NonNegative = 0.0,
        kl_estimator: KLEstimator = "k3",
        adaptive_kl: AdaptiveKL | None = None,
        decisions_per_forward: PositiveInt | None = None,
        params: ActionSamplingParams | None = None,
    ) -> None:
        if kl_estimator not in ("k1", "k2", "k3"):
            raise ConfigError(f"algorithm.kl_estimator = {kl_estimator!r}: actions have k1, k2 and k3.")
        super().__init__(
            ReferenceKL(policies, coef=kl_coef, estimator=kl_estimator, adaptive=adaptive_kl),
            seed=0,  # nothing is drawn
            old_logp_source=old_logp_source,
            rollout_correction=None,
        )
        self._pipeline = pipeline
        self._policies = policies
        self.clip_low = clip_range
        self.clip_high = clip_range if clip_range_high is None else clip_range_high
        self.clip_schedule: ClipSchedule = clip_schedule
        self.advantage_clip = advantage_clip
        self.entropy_coef = entropy_coef
        self.decisions_per_forward = decisions_per_forward
        self._params = params

    def num_terms(self, track: RolloutTrack) -> int:
        """Terms that count, of all decisions."""
        return int(action_segment(track).term_mask.sum())

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs [N, L] under the policy before the first update."""
        segment = action_segment(micro.track)
        with torch.no_grad():
            parts = [self._replay(segment, decisions).logp_NL for decisions in self._forwards(segment)]
        return {"logp": torch.cat(parts)}

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part per forward: the sum over terms of surrogate + kl_coef * KL - entropy_coef * entropy."""
        segment = action_segment(micro.track)
        mask_NL, given_N = segment.term_mask, self.decision_advantages(micro)
        advantage_N = given_N
        if self.advantage_clip is not None:
            advantage_N = given_N.clamp(-self.advantage_clip, self.advantage_clip)
        factor = clip_factor(self.clip_schedule, micro.progress)
        for decisions in self._forwards(segment):

            def replay(decisions: Tensor = decisions) -> ActionStats:
                return self._replay(segment, decisions)

            reference = self.reference.evaluate(replay)
            stats, metrics = replay(), RowMetrics()
            counts = mask_NL[decisions]
            logp_M = stats.logp_NL[counts]
            old_M = self._old_logp(micro, segment, decisions, stats)[counts]
            loss_M, measured = clipped_surrogate(
                logp_M,
                old_M,
                advantage_N[decisions, None].expand_as(counts)[counts],
                clip_low=self.clip_low * factor,
                clip_high=self.clip_high * factor,
            )
            report_ratio(metrics, logp_M - old_M)
            metrics.mean("policy/clipfrac_high", measured["clipped_high"])
            metrics.mean("policy/clipfrac_low", measured["clipped_low"])
            metrics.mean("policy/loss", loss_M)
            report_clipped(metrics, given_N[decisions], self.advantage_clip)
            self._report_gap(micro, segment, decisions, stats, metrics)
            if stats.entropy_NL is not None:
                entropy_M = stats.entropy_NL[counts]
                metrics.mean("policy/entropy", entropy_M)
                loss_M = loss_M - self.entropy_coef * entropy_M
            if reference is not None:
                kl_M = self.reference.of_actions(logp_M, reference.logp_NL[counts], metrics)
                loss_M = loss_M + self.reference.penalty(kl_M, metrics, loss=loss_M)
            added_N = self.added_loss(micro, decisions, stats, metrics)
            if added_N is not None:
                loss_M = loss_M + added_N[:, None].expand_as(counts)[counts]
            yield LossPart(loss_M.sum(), loss_M.numel(), metrics)

    # What subclasses may refine ---------------------------------------------------------------------------------

    def decision_advantages(self, micro: MicroBatch) -> Tensor:
        """Advantage of every decision [N], before it is clipped: that of its episode."""
        advantages = micro.advantages
        return advantages[action_segment(micro.track).episode_N.to(advantages.device)]

    def added_loss(
        self, micro: MicroBatch, decisions: Tensor, stats: ActionStats, metrics: RowMetrics
    ) -> Tensor | None:
        """A loss [n] of some decisions to add to that of each of their terms, from the replay with gradients."""
        return None

    # ------------------------------------------------------------------------------------------------------------

    def _forwards(self, segment: ActionSegment) -> list[Tensor]:
        """The decisions of each forward, int64."""
        every = torch.arange(segment.num_decisions, device=segment.rewards.device)
        return [every[rows] for rows in row_chunks(segment.num_decisions, self.decisions_per_forward)]

    def _old_logp(self, micro: MicroBatch, segment: ActionSegment, decisions: Tensor, stats: ActionStats) -> Tensor:
        """[n, L] under the policy before the first update."""
        if self.old_logp_source == "log-linear":
            share_B = self.log_linear_share(micro, self._policies)
            share_N = share_B[segment.episode_N.to(share_B.device)][decisions]
            rollout = _rollout_logp(segment, decisions)
            return log_linear_logp(stats.logp_NL, rollout, share_N[:, None].expand_as(rollout))
        if self.old_logp_source != "rollout":
            if "logp" in micro.anchor:
                return micro.anchor["logp"][decisions]
            if micro.update == 0:
                return stats.logp_NL.detach()
        return _rollout_logp(segment, decisions)

    @staticmethod
    def _report_gap(
        micro: MicroBatch, segment: ActionSegment, decisions: Tensor, stats: ActionStats, metrics: RowMetrics
    ) -> None:
        """Distance between the rollout's log-probs and the trainer's before the first update."""
        replayed = stats.logp_NL.detach() if micro.update == 0 else micro.anchor.get("logp", torch.empty(0))
        if segment.log_probs is None or not replayed.numel():
            return
        own = replayed if micro.update == 0 else replayed[decisions]
        gap_M = (own - segment.log_probs[decisions]).abs()[segment.term_mask[decisions]]
        metrics.mean("mismatch/logp_absdiff/mean", gap_M)
        metrics.max("mismatch/logp_absdiff/max", gap_M)

    def _replay(self, segment: ActionSegment, decisions: Tensor) -> ActionStats:
        return self._pipeline.replay(segment, decisions, sampled_with(segment.params, self._params))


def _rollout_logp(segment: ActionSegment, decisions: Tensor) -> Tensor:
    if segment.log_probs is None:
        raise ContractError(
            "these episodes were played by the most probable actions and have no log-probs. Set "
            "algorithm.old_logp_source: replay, or sample them."
        )
    return segment.log_probs[decisions]
