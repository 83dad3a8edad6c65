"""Policy gradients on denoising transitions: everything but the surrogate, which each algorithm writes.

A denoising trajectory is an episode whose actions are the stochastic steps; the kernel gives each a Gaussian density.
Legend: B samples, S stochastic steps, C of them trained a sample, R = B C rows (sample-major).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    report_clipped,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.credit import StepCredit
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.old_logp import OldLogpSource, RatioAlgorithm, log_linear_logp
from unirl.algorithms.reference import KLEstimator, ReferenceKL
from unirl.algorithms.rollout_correction import (
    RolloutCorrection,
    report_correction,
    report_second_moment,
    report_staleness,
)
from unirl.algorithms.transition_rules import cut_trajectory
from unirl.sde.loop import transition_rows
from unirl.sde.noise import keyed_permutation
from unirl.types.bounds import NonNegative, PositiveFraction, PositiveInt, PositiveOrInf, Seed, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline, TransitionStats
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


@dataclass(frozen=True)
class TransitionRows:
    """R stored transitions as a surrogate sees them."""

    policy: TransitionStats
    """Under the weights being trained, with gradients."""
    anchor_logp_R: Tensor
    """[R] float32 under the policy before the first update."""
    anchor_mean: Tensor | None
    """[R, ...] float32 means before the first update, where the algorithm keeps them (`keeps_anchor_means`)."""
    advantage_R: Tensor
    """[R] float32, clipped, with the credit of the step."""
    delta_sigma_R: Tensor
    """[R] float32 sigma - sigma_next > 0, the length of each step."""
    sample_R: Tensor
    """[R] int64, row of the micro-batch."""
    step_R: Tensor
    """[R] int64, step of the schedule."""
    progress: float
    """Fraction of the run done, in [0, 1]."""

    @property
    def log_ratio_R(self) -> Tensor:
        """log p / p_old a row, with gradients."""
        return self.policy.logp_R - self.anchor_logp_R


@bounded("algorithm")
class TransitionAlgorithm(RatioAlgorithm):
    """Base of the policy gradients: anchor, rows, credit, reference penalty. A subclass writes `surrogate`.

    advantage_clip: advantages are clamped to +- this; None leaves them.
    old_logp_source, rollout_correction: see `RatioAlgorithm`.
    step_fraction: share of the stochastic steps trained a sample, drawn anew for every sample (DanceGRPO: 0.6).
    credit: how a sample's advantage is spread over its steps; None gives each step all of it.
    kl_coef, kl_estimator, adaptive_kl: penalty towards the reference, see `ReferenceKL`.
    rows_per_forward: memory knob; the rows of a micro-batch are replayed in chunks of this many. A multiple of the
        steps trained a sample where those are judged together (`joins_steps`, a correction whose level is not "token").
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.transition_rules"
    requires_sde: ClassVar[bool] = True
    trains_own_steps: ClassVar[bool] = True
    requires_gaussian_mean: ClassVar[bool] = False
    """True if the kernel's log-prob must be a density, averaged over the elements."""
    keeps_anchor_means: ClassVar[bool] = False
    """True if the anchor holds the transition means too (one latent a row)."""
    joins_steps: ClassVar[bool] = False
    """True if the surrogate needs all trained steps of a sample in one call."""

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        advantage_clip: PositiveOrInf | None = 5.0,
        old_logp_source: OldLogpSource = "auto",
        rollout_correction: RolloutCorrection | None = None,
        step_fraction: PositiveFraction = 1.0,
        credit: StepCredit | None = None,
        kl_coef: NonNegative = 0.0,
        kl_estimator: KLEstimator = "exact",
        adaptive_kl: AdaptiveKL | None = None,
        rows_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if old_logp_source in ("rollout", "log-linear") and self.keeps_anchor_means:
            raise ConfigError(
                f"{type(self).__name__} compares transition means, which a rollout does not keep. "
                "Set algorithm.old_logp_source: replay."
            )
        super().__init__(
            ReferenceKL(policies, coef=kl_coef, estimator=kl_estimator, adaptive=adaptive_kl),
            seed=seed,
            old_logp_source=old_logp_source,
            rollout_correction=rollout_correction,
        )
        self._pipeline = pipeline
        self._policies = policies
        self.advantage_clip = advantage_clip
        self.step_fraction = step_fraction
        self.credit = credit
        self.rows_per_forward = rows_per_forward
        self._params = params

    @abstractmethod
    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """Loss of every row [R], to be minimised, with gradients to `rows.policy`; and what it measured."""

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times trained steps."""
        return track.batch_size * self._num_trained_steps(track)

    @property
    def needs_replay(self) -> bool:
        """True if transition means are compared, or there are weights against the rollout."""
        return self.keeps_anchor_means or super().needs_replay

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs [B, C] under the policy before the first update, and means [B, C, ...] where they are kept; a row a
        unit where units train together."""
        sample_R, step_R = self.rows(micro)
        with torch.no_grad():
            parts = [
                self._replay(micro, sample_R[rows], step_R[rows])
                for rows in row_chunks(sample_R.numel(), self.rows_per_forward)
            ]
        shape = (micro.segment.batch_size // self.samples_per_unit, -1)
        anchor = {"logp": torch.cat([part.logp_R for part in parts]).view(shape)}
        if self.keeps_anchor_means:
            anchor["mean"] = torch.cat([part.mean for part in parts]).unflatten(0, shape)
        if self.judges_update:
            rollout_R = self._rollout_logp(micro, sample_R, step_R)
            gap_R, weight_R = self._correction(micro, anchor["logp"].flatten(), rollout_R, sample_R, step_R)
            anchor.update(gap=gap_R.view(shape), correction=weight_R.view(shape))
        return anchor

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over rows of correction * surrogate + kl_coef * KL.

        Raises ConfigError if a chunk would cut a trajectory that is judged whole, ContractError if log-probs of the
        rollout are needed but missing.
        """
        segment = micro.segment
        sample_R, step_R = self.rows(micro)
        self._check_chunks(sample_R.numel() // segment.batch_size)
        rollout_R = self._rollout_logp(micro, sample_R, step_R)
        given_R = self.row_advantages(micro, sample_R, step_R)
        advantage_R = given_R
        if self.advantage_clip is not None:
            advantage_R = given_R.clamp(-self.advantage_clip, self.advantage_clip)
        if self.credit is not None:
            advantage_R = advantage_R * self.credit.weights(segment, self._pipeline).to(advantage_R.device)[step_R]
        delta_R = (-segment.sigmas.diff())[step_R].to(advantage_R.device)
        for rows in row_chunks(sample_R.numel(), self.rows_per_forward):
            samples, steps = sample_R[rows], step_R[rows]

            def replay(samples: Tensor = samples, steps: Tensor = steps) -> TransitionStats:
                return self._replay(micro, samples, steps)

            reference = self.reference.evaluate(replay)
            policy = replay()
            if micro.traces is not None:
                micro.traces.steps(micro.track, micro.update, samples, steps, policy.logp_R)
            given_logp_R = None if rollout_R is None else rollout_R[rows]
            if self.old_logp_source == "log-linear":
                replayed_R = self._log_linear(micro, policy, given_logp_R, samples, steps)
            else:
                replayed_R = self._replayed_logp(micro, policy, rows)
            loss_R, metrics = self.surrogate(
                TransitionRows(
                    policy=policy,
                    anchor_logp_R=self._old_logp(replayed_R, given_logp_R),
                    anchor_mean=self._old_mean(micro, policy, rows),
                    advantage_R=advantage_R[rows],
                    delta_sigma_R=delta_R[rows],
                    sample_R=samples,
                    step_R=steps,
                    progress=micro.progress,
                )
            )
            if self.rollout_correction is not None:
                gap_R, weight_R = self._correction(micro, replayed_R, given_logp_R, samples, steps, metrics)
                if "m2_masked" in micro.anchor:
                    weight_R = micro.anchor["correction"].flatten()[rows]
                    report_second_moment(metrics, gap_R, weight_R, micro.anchor["m2_masked"].flatten()[rows])
                report_correction(metrics, weight_R)
                loss_R = loss_R * weight_R
            metrics.mean("policy/loss", loss_R)
            report_clipped(metrics, given_R[rows], self.advantage_clip)
            if replayed_R is not None and given_logp_R is not None:
                report_gap(metrics, (replayed_R - given_logp_R).abs(), steps, segment.sde_indices)
            if reference is not None:
                kl_R = self.reference.of_transitions(policy, reference, metrics)
                loss_R = loss_R + self.reference.penalty(kl_R, metrics, steps, segment.sde_indices, loss=loss_R)
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    # What subclasses may refine ---------------------------------------------------------------------------------

    def rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """sample_R and step_R of the rows that train, [R] int64 each on the CPU, the same at every call."""
        segment = micro.segment
        num_trained = self._num_trained_steps(micro.track)
        if segment.own_steps is not None:
            return torch.arange(segment.batch_size), segment.own_steps.cpu()
        if num_trained == len(segment.sde_indices):
            return transition_rows(segment.batch_size, segment.sde_indices)
        steps = torch.tensor(segment.sde_indices)
        chosen_BC = torch.stack(
            [
                keyed_permutation(f"r{self.num_rollouts}:{sample}::steps", self.seed, len(steps))[:num_trained]
                for sample in micro.track.sample_ids
            ]
        )
        sample_R = torch.arange(segment.batch_size).repeat_interleave(num_trained)
        return sample_R, steps[chosen_BC.sort(dim=1).values].flatten()

    def row_advantages(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor:
        """Advantage of every row [R], before it is clipped and weighted by `credit`: that of its sample."""
        return micro.advantages[sample_R]

    # ------------------------------------------------------------------------------------------------------------

    def _num_trained_steps(self, track: RolloutTrack) -> int:
        steps = self._stochastic_steps(track)
        if isinstance(track.segment, LatentSegment) and track.segment.own_steps is not None:
            return 1
        return max(int(self.step_fraction * len(steps) + 1e-9), 1)

    def _stochastic_steps(self, track: RolloutTrack) -> list[int]:
        segment = track.segment
        if not isinstance(segment, LatentSegment) or not segment.sde_indices:
            raise ContractError(
                f"{type(self).__name__} needs stochastic steps: set sampling.eta > 0 and sampling.scheduler"
            )
        return segment.sde_indices

    @staticmethod
    def _replayed_logp(micro: MicroBatch, policy: TransitionStats, rows: slice) -> Tensor | None:
        """Log-probs [R] of `rows` under the policy before the first update: the anchor's, or at the first update those
        of its own forward; None where there are neither."""
        if "logp" in micro.anchor:
            return micro.anchor["logp"].flatten()[rows]
        return policy.logp_R.detach() if micro.update == 0 else None

    def _log_linear(
        self, micro: MicroBatch, policy: TransitionStats, rollout_R: Tensor | None, sample_R: Tensor, step_R: Tensor
    ) -> Tensor:
        if rollout_R is None:
            raise ContractError(
                "old_logp_source = 'log-linear' but the engine returned no log-probs. Use old_logp_source: replay."
            )
        share_R = self.log_linear_share(micro, self._policies, _versions(micro, sample_R, step_R))
        return log_linear_logp(policy.logp_R, rollout_R, share_R)

    def _old_logp(self, replayed_R: Tensor | None, rollout_R: Tensor | None) -> Tensor:
        if self.old_logp_source != "rollout" and replayed_R is not None:
            return replayed_R
        if rollout_R is None:
            raise ContractError(
                f"old_logp_source = {self.old_logp_source!r} but the engine returned no log-probs. "
                "Use old_logp_source: replay."
            )
        return rollout_R

    def _check_chunks(self, num_steps: int) -> None:
        rows, correction = self.rows_per_forward, self.rollout_correction
        is_whole = self.joins_steps or (correction is not None and correction.level != "token")
        if is_whole and rows is not None and rows % num_steps:
            raise ConfigError(cut_trajectory("algorithm", type(self).__name__, rows, num_steps))

    def _correction(
        self,
        micro: MicroBatch,
        replayed_R: Tensor | None,
        rollout_R: Tensor | None,
        sample_R: Tensor,
        step_R: Tensor,
        metrics: RowMetrics | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gap [R] between the trainer's log-probs and the engine's of whole samples' rows, and their weights."""
        if self.rollout_correction is None or replayed_R is None or rollout_R is None:
            raise ContractError(
                "algorithm.rollout_correction compares a replay with the engine's log-probs, and the engine "
                "returned none. Set rollout_correction: null."
            )
        samples_B, lengths_B = sample_R.unique_consecutive(return_counts=True)
        staleness_B = self.staleness(micro, self._policies)
        staleness_R = self.staleness(micro, self._policies, _versions(micro, sample_R, step_R))
        if staleness_B is not None and metrics is not None:
            report_staleness(metrics, staleness_B[samples_B.to(staleness_B.device)].float())
        gap_R = replayed_R - rollout_R.to(replayed_R.device)
        noise_R = None if self.rollout_correction.noise_floor is None else self._noise(micro.segment, step_R)
        return gap_R, self.rollout_correction.weights(gap_R, lengths_B.to(gap_R.device), staleness_R, noise_R)

    def _noise(self, segment: LatentSegment, step_R: Tensor) -> Tensor:
        """Standard deviation [R] of the noise of some steps. Raises ConfigError if the floor is above all steps, also
        those that a moving window makes stochastic in other rollouts."""
        steps = list(range(segment.num_steps))
        std_T = self._pipeline.step_std(segment.replace(sde_indices=steps, sde_logp=None, sde_means=None))
        floor = None if self.rollout_correction is None else self.rollout_correction.noise_floor
        if floor is not None and not bool((std_T >= floor).any()):
            raise ConfigError(
                f"algorithm.rollout_correction.noise_floor = {floor} leaves out every step of a stale sample: the "
                f"standard deviations of their noise are {', '.join(f'{std:.3g}' for std in std_T.tolist())}. Set it "
                "between two of them."
            )
        return std_T[step_R.to(std_T.device)]

    def _old_mean(self, micro: MicroBatch, policy: TransitionStats, rows: slice) -> Tensor | None:
        if not self.keeps_anchor_means:
            return None
        return micro.anchor["mean"].flatten(0, 1)[rows] if "mean" in micro.anchor else policy.mean.detach()

    @staticmethod
    def _rollout_logp(micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor | None:
        """The engine's log-probs [R]; None where it returned none."""
        logp_BS = micro.segment.sde_logp
        if logp_BS is None:
            return None
        columns = {step: column for column, step in enumerate(micro.segment.sde_indices)}
        return logp_BS[sample_R, [columns[step] for step in step_R.tolist()]]

    def _replay(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> TransitionStats:
        params = sampled_with(micro.segment.params, self._params)
        return self._pipeline.replay(micro.track.conditions, micro.segment, sample_R, step_R, params)


def _versions(micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor | None:
    """Version of the policy that took each step, int64 [R]; None if the engine gives none."""
    versions_BT, versions_B = micro.segment.versions, micro.track.policy_versions
    if versions_BT is not None:
        return versions_BT[sample_R.to(versions_BT.device), step_R.to(versions_BT.device)]
    return None if versions_B is None else versions_B[sample_R.to(versions_B.device)]


def report_gap(metrics: RowMetrics, gap_R: Tensor, step_R: Tensor, steps: Sequence[int]) -> None:
    """Distance between the rollout's log-probs and the trainer's before the first update, in all and for each step."""
    metrics.mean("mismatch/logp_absdiff/mean", gap_R)
    metrics.max("mismatch/logp_absdiff/max", gap_R)
    for step in steps:
        metrics.mean(f"mismatch/logp_absdiff/ts_{step}", gap_R[(step_R == step).to(gap_R.device)])
