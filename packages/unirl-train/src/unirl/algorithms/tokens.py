"""Policy gradients on generated tokens: everything but the surrogate, which each algorithm writes.

A completion is an episode whose actions are its tokens; the model's softmax gives each a probability.
Legend: B samples, N tokens of their segments, M of them trained (the loss mask leaves the others out), lengths_B
trained tokens of each sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    report_clipped,
    report_ratio,
    sampled_with,
)
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.old_logp import OldLogpSource, RatioAlgorithm, log_linear_logp
from unirl.algorithms.reference import KLEstimator, ReferenceKL
from unirl.algorithms.rollout_correction import (
    RolloutCorrection,
    report_correction,
    report_second_moment,
    report_staleness,
)
from unirl.algorithms.token_losses import (
    ImportanceLevel,
    LossAggregation,
    aggregation_weights,
    importance_log_ratio,
    sequence_index,
    sequence_sum,
)
from unirl.algorithms.token_rules import TOKENS_HAVE_NO_NOISE
from unirl.types.bounds import NonNegative, PositiveInt, PositiveOrInf, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import AutoregressivePipeline, MeasuresReplays, TokenStats
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment


@dataclass(frozen=True)
class TokenRows:
    """M trained tokens as a surrogate sees them."""

    logp_M: Tensor
    """[M] float32, nats, under the weights being trained, with gradients."""
    anchor_logp_M: Tensor
    """[M] float32 under the policy before the first update."""
    log_ratio_M: Tensor
    """[M] float32 log of the importance ratio at the algorithm's level, with gradients."""
    advantage_M: Tensor
    """[M] float32, clipped."""
    lengths_B: Tensor
    """[B] int64, summing to M."""
    progress: float
    """Fraction of the run done, in [0, 1]."""


@dataclass(frozen=True)
class TrainedTokens:
    """Which tokens of a micro-batch train."""

    chosen_N: Tensor
    """[N] bool."""
    lengths_B: Tensor
    """[B] int64."""

    def of(self, values_N: Tensor) -> Tensor:
        """The values of the trained tokens, [M, ...]."""
        return values_N[self.chosen_N]


@bounded("algorithm")
class TokenAlgorithm(RatioAlgorithm):
    """Base of the policy gradients on tokens: anchor, masks, aggregation, reference penalty. A subclass writes
    `surrogate`.

    importance_level: what a ratio is of, see `token_losses.importance_log_ratio`.
    loss_agg_mode, horizon: how token losses become one number, see `token_losses.aggregation_weights`; horizon is the
        constant length of seq-mean-token-sum-norm and must be given with it alone.
    advantage_clip: advantages are clamped to +- this; None leaves them.
    old_logp_source: see `RatioAlgorithm`.
    rollout_correction: see `RatioAlgorithm`.
    mask_truncated: leave out samples that ran into the length limit, whose reward says little of what they began.
    kl_coef, kl_estimator, adaptive_kl: penalty towards the reference, see `ReferenceKL`; from the sampled tokens.
    entropy_coef: weight of the entropy that is rewarded in addition to the surrogate.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.token_rules"
    trains_tokens: ClassVar[bool] = True
    reduces_ratios: ClassVar[bool] = False
    """True if the surrogate reduces the ratios of tokens itself, so that `importance_level` must be token."""
    penalises_reward: bool = False
    """True if the penalty towards the reference goes into a reward per token instead of the loss."""

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        importance_level: ImportanceLevel = "token",
        loss_agg_mode: LossAggregation = "token-mean",
        horizon: PositiveInt | None = None,
        advantage_clip: PositiveOrInf | None = None,
        old_logp_source: OldLogpSource = "auto",
        rollout_correction: RolloutCorrection | None = None,
        mask_truncated: bool = False,
        kl_coef: NonNegative = 0.0,
        kl_estimator: KLEstimator = "k3",
        adaptive_kl: AdaptiveKL | None = None,
        entropy_coef: NonNegative = 0.0,
        params: ARSamplingParams | None = None,
    ) -> None:
        if (horizon is None) == (loss_agg_mode == "seq-mean-token-sum-norm"):
            raise ConfigError(
                f"algorithm.horizon = {horizon} with algorithm.loss_agg_mode = {loss_agg_mode}: the constant length "
                "(at least 1 token, usually sampling.max_new_tokens) belongs to seq-mean-token-sum-norm alone."
            )
        if self.reduces_ratios and importance_level != "token":
            raise ConfigError(
                f"algorithm.importance_level = {importance_level!r}, but {type(self).__name__} reduces the ratios of "
                "tokens itself. Set importance_level: token."
            )
        if kl_estimator not in ("k1", "k2", "k3"):
            raise ConfigError(f"algorithm.kl_estimator = {kl_estimator!r}: tokens have k1, k2 and k3")
        if rollout_correction is not None and rollout_correction.noise_floor is not None:
            raise ConfigError(f"algorithm.rollout_correction.{TOKENS_HAVE_NO_NOISE}")
        # No draw depends on the seed here.
        super().__init__(
            ReferenceKL(policies, coef=kl_coef, estimator=kl_estimator, adaptive=adaptive_kl),
            seed=0,
            old_logp_source=old_logp_source,
            rollout_correction=rollout_correction,
        )
        self._pipeline = pipeline
        self._policies = policies
        self.importance_level: ImportanceLevel = importance_level
        self.loss_agg_mode: LossAggregation = loss_agg_mode
        self.horizon = horizon or 1
        self.advantage_clip = advantage_clip
        self.mask_truncated = mask_truncated
        self.entropy_coef = entropy_coef
        self._params = params

    @abstractmethod
    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """Loss of every token [M], to be minimised, with gradients; and what it measured."""

    def num_terms(self, track: RolloutTrack) -> int:
        """Trained tokens under token-mean, samples otherwise."""
        if self.loss_agg_mode == "token-mean":
            return int(self._trained(track).lengths_B.sum())
        return track.batch_size

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """What `losses` needs of the policy before the first update, [M] each: the log-probs and `anchor_fields`."""
        reference = self.reference.evaluate(lambda: self._replay(micro)) if self.penalises_reward else None
        with torch.no_grad():
            stats = self._replay(micro)
        return self._frozen(micro, self._trained(micro.track), stats, reference)

    def _frozen(
        self, micro: MicroBatch, trained: TrainedTokens, stats: TokenStats, reference: TokenStats | None
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            logp_M = trained.of(stats.logp_N).detach()
            reference_M = None if reference is None else trained.of(reference.logp_N)
            return {
                "logp": logp_M,
                **self._correction(micro, trained, logp_M),
                **self.anchor_fields(micro, stats, trained, reference_M),
            }

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part: the weighted sum over tokens of surrogate + kl_coef * KL - entropy_coef * entropy."""
        trained = self._trained(micro.track)
        is_first = micro.update == 0 and not micro.anchor
        reference = None
        if is_first or not self.penalises_reward:  # later, a penalty in the reward is part of the anchor
            reference = self.reference.evaluate(lambda: self._replay(micro))
        stats = self._replay(micro)
        replayed = self._pipeline.replay_metrics() if isinstance(self._pipeline, MeasuresReplays) else {}
        logp_M = trained.of(stats.logp_N)
        if micro.traces is not None:
            micro.traces.tokens(micro.track, micro.update, trained.chosen_N, logp_M, self._pipeline.decode)
        if self.old_logp_source == "log-linear":
            old_M = self._log_linear(micro, trained, logp_M)
            micro = replace(micro, anchor={"logp": old_M, **self._correction(micro, trained, old_M)})
        elif is_first:
            micro = replace(micro, anchor=self._frozen(micro, trained, stats, reference))
        given_M = self.token_advantages(micro, trained)
        advantage_M = given_M
        if self.advantage_clip is not None:
            advantage_M = given_M.clamp(-self.advantage_clip, self.advantage_clip)
        replayed_M = micro.anchor.get("logp")
        trusts_rollout = self.old_logp_source == "rollout" or replayed_M is None
        anchor_M = trained.of(rollout_logp(micro.track)) if trusts_rollout else replayed_M
        rows = TokenRows(
            logp_M=logp_M,
            anchor_logp_M=anchor_M,
            log_ratio_M=importance_log_ratio(logp_M, anchor_M, trained.lengths_B, level=self.importance_level),
            advantage_M=advantage_M,
            lengths_B=trained.lengths_B,
            progress=micro.progress,
        )
        loss_M, metrics = self.surrogate(rows)
        for name, (total, count) in replayed.items():
            metrics.add(name, total, count)
        self._report_rollout(micro, trained, metrics)
        if "correction" in micro.anchor:
            loss_M = loss_M * micro.anchor["correction"]
        weight_M, num_terms = aggregation_weights(trained.lengths_B, mode=self.loss_agg_mode, horizon=self.horizon)
        weight_M = weight_M.to(loss_M.device)
        metrics.add("policy/loss", (weight_M * loss_M.detach()).sum(), num_terms)
        report_ratio(metrics, rows.log_ratio_M)
        report_clipped(metrics, given_M, self.advantage_clip)
        report_responses(metrics, micro.track)
        entropy_M = trained.of(stats.entropy_N)
        metrics.mean("policy/entropy", entropy_M)
        if self.entropy_coef > 0:
            loss_M = loss_M - self.entropy_coef * entropy_M
        if reference is not None and not self.penalises_reward:
            kl_M = self.reference.of_actions(logp_M, trained.of(reference.logp_N), metrics)
            loss_M = loss_M + self.reference.penalty(kl_M, metrics, loss=loss_M)
        added_M = self.added_loss(micro, stats, trained, metrics)
        if added_M is not None:
            loss_M = loss_M + added_M
        yield LossPart((weight_M.to(loss_M) * loss_M).sum(), num_terms, metrics)

    # What subclasses may refine ---------------------------------------------------------------------------------

    def token_advantages(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """Advantage of every trained token [M], before it is clipped: that of its sample."""
        return micro.advantages[sequence_index(trained.lengths_B)]

    def anchor_fields(
        self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, reference_logp_M: Tensor | None
    ) -> dict[str, Tensor]:
        """More to freeze before the first update, from a replay by then, without gradients.

        reference_logp_M: the reference's log-probs, where the algorithm `penalises_reward` and the penalty is on.
        """
        return {}

    def added_loss(
        self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, metrics: RowMetrics
    ) -> Tensor | None:
        """A loss [M] to add to the surrogate, from the replay with gradients."""
        return None

    # ------------------------------------------------------------------------------------------------------------

    def _trained(self, track: RolloutTrack) -> TrainedTokens:
        segment = text_segment(track)
        chosen_N = segment.trained
        index_N = sequence_index(segment.lengths).to(chosen_N.device)
        if self.mask_truncated and segment.status is not None:
            chosen_N = chosen_N & (segment.status != SegmentStatus.TRUNCATED)[index_N]
        lengths_B = sequence_sum(chosen_N.long(), segment.lengths.to(chosen_N.device))
        return TrainedTokens(chosen_N, lengths_B)

    def _log_linear(self, micro: MicroBatch, trained: TrainedTokens, logp_M: Tensor) -> Tensor:
        share_M = self.log_linear_share(micro, self._policies, _versions(micro.track, trained))
        return log_linear_logp(logp_M, trained.of(rollout_logp(micro.track)), share_M)

    def _correction(self, micro: MicroBatch, trained: TrainedTokens, logp_M: Tensor) -> dict[str, Tensor]:
        """Weights [M] of the rollout's samples and, where they are known, optimizer steps [B] since their policy."""
        if self.rollout_correction is None:
            return {}
        gap_M = logp_M - trained.of(rollout_logp(micro.track))
        judged = {"gap": gap_M} if self.judges_update else {}
        staleness_B = self.staleness(micro, self._policies)
        if staleness_B is None:
            return {"correction": self.rollout_correction.weights(gap_M, trained.lengths_B, None), **judged}
        staleness_B = staleness_B.to(gap_M.device)
        staleness_M = self.staleness(micro, self._policies, _versions(micro.track, trained))
        weight_M = self.rollout_correction.weights(gap_M, trained.lengths_B, staleness_M)
        return {"correction": weight_M, "staleness": staleness_B.float(), **judged}

    def _report_rollout(self, micro: MicroBatch, trained: TrainedTokens, metrics: RowMetrics) -> None:
        """How far the rollout was from the policy before the first update, and what that weighs."""
        frozen = micro.anchor
        if "logp" in frozen and text_segment(micro.track).log_probs is not None:
            gap_M = (frozen["logp"] - trained.of(rollout_logp(micro.track))).abs()
            metrics.mean("mismatch/logp_absdiff/mean", gap_M)
            metrics.max("mismatch/logp_absdiff/max", gap_M)
        if "staleness" in frozen:
            report_staleness(metrics, frozen["staleness"])
        if "correction" in frozen:
            report_correction(metrics, frozen["correction"])
        if "m2_masked" in frozen:
            report_second_moment(metrics, frozen["gap"], frozen["correction"], frozen["m2_masked"])

    def _replay(self, micro: MicroBatch) -> TokenStats:
        segment = text_segment(micro.track)
        return self._pipeline.replay(micro.track.conditions, segment, sampled_with(segment.params, self._params))


def text_segment(track: RolloutTrack) -> TextSegment:
    """The track's tokens. Raises ContractError for another kind of segment."""
    if not isinstance(track.segment, TextSegment):
        raise ContractError(f"expected a text segment, the track holds {type(track.segment).__name__}")
    return track.segment


def rollout_logp(track: RolloutTrack) -> Tensor:
    """The engine's log-probs [N]. Raises ContractError if it gave none, or not a number for a trained token."""
    segment = text_segment(track)
    if segment.log_probs is None:
        raise ContractError(
            "the engine returned no log-probs. Set algorithm.old_logp_source: replay and rollout_correction: null."
        )
    right = torch.isfinite(segment.log_probs) | ~segment.trained
    if not bool(right.all()):  # in this form, since what a rehearsal does not know reads True
        wrong = ~right
        index_N = sequence_index(segment.lengths).to(wrong.device)
        samples = sorted({track.sample_ids[row] for row in index_N[wrong].tolist()})
        raise ContractError(
            f"the engine returned log-probs that are not finite for {int(wrong.sum())} tokens of {samples[:4]}"
        )
    return segment.log_probs


def report_responses(metrics: RowMetrics, track: RolloutTrack) -> None:
    """Lengths in tokens and the fraction that ran into the limit, under the names that all algorithms share."""
    segment = text_segment(track)
    lengths = segment.lengths.float()
    metrics.mean("response/length_mean", lengths)
    metrics.max("response/length_max", lengths)
    is_truncated = (
        torch.zeros(track.batch_size) if segment.status is None else segment.status == SegmentStatus.TRUNCATED
    )
    metrics.mean("response/truncated_fraction", is_truncated.float())


def _versions(track: RolloutTrack, trained: TrainedTokens) -> Tensor | None:
    """Version of the policy that sampled each trained token, int64 [M]; None if the engine gives none."""
    if (versions_N := text_segment(track).versions) is not None:
        return trained.of(versions_N)
    if (versions_B := track.policy_versions) is None:
        return None
    return versions_B.to(trained.lengths_B.device)[sequence_index(trained.lengths_B)]
