"""On-policy distillation of images: the student samples, the teacher says which velocity it would have had there.

Of two Gaussian transitions with one spread s the reverse KL is mean (mu - mu_teacher)^2 / 2 s^2, and mu - mu_teacher is
v - v_teacher times a number of the schedule; of a deterministic step the means themselves are compared. Both ask for
the teacher's velocity at the latents of the student's own trajectory, which is matched here with one weight for all
steps. Legend: B samples, T steps, K of them trained a sample, R = B K rows (sample-major).
Source: Li et al. 2026 (arXiv 2605.15055), DiffusionOPD.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, row_chunks, sampled_with
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.algorithms.teacher import require_same_latents
from unirl.algorithms.trajectory_rows import TrajectoryRows, drawn_rows, num_trained_steps
from unirl.types.bounds import NonNegative, PositiveInt, Seed, bounded
from unirl.types.errors import ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams


@bounded("algorithm")
class DiffusionDistillation(PenalisedAlgorithm):
    """mean (v - v_teacher)^2 at K steps of the student's own trajectory. Advantages are not used.

    teacher: name of a policy with trains: false and a model of the student's class: it reads the student's conditions.
    num_timesteps: K, steps drawn without repetition for each sample; None takes all.
    kl_coef, adaptive_kl: penalty mean (v - v_ref)^2, see `ReferenceKL`; 0 switches the reference off.
    rows_per_forward: memory knob.
    The latents are those of the policy that sampled; later updates of a rollout match there too.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.teacher_rules"
    teacher_option: ClassVar[str | None] = "teacher"
    takes_stale_samples: ClassVar[bool] = True
    trained_rows: ClassVar[str | int | None] = "num_timesteps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        teacher: str,
        num_timesteps: PositiveInt | None = None,
        kl_coef: NonNegative = 0.0,
        adaptive_kl: AdaptiveKL | None = None,
        rows_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        super().__init__(ReferenceKL(policies, coef=kl_coef, adaptive=adaptive_kl), seed=seed)
        self._pipeline = pipeline
        self.teacher_name = teacher
        self._teacher: DiffusionPipeline | None = None
        self.num_timesteps = num_timesteps
        self.rows_per_forward = rows_per_forward
        self._params = params

    def use_teacher(self, teacher: DiffusionPipeline, params: DiffusionSamplingParams) -> None:
        """Ask this pipeline. Raises ConfigError for a teacher with another latent space."""
        require_same_latents(self._pipeline, teacher, params, self.teacher_name)
        self._teacher = teacher

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times trained steps."""
        return track.batch_size * self._num_trained_steps(track)

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (sample, step) of the loss."""
        segment, teacher = micro.segment, self._teacher
        if teacher is None:
            raise ContractError(f"the teacher {self.teacher_name!r} was not handed over: call use_teacher first")
        params = sampled_with(segment.params, self._params)
        sample_R, step_R = self.rows(micro)
        for chunk in row_chunks(sample_R.numel(), self.rows_per_forward):
            steps = step_R[chunk]
            rows = TrajectoryRows.of(micro, sample_R[chunk], steps)
            with teacher.evaluating():
                v_teacher = rows.velocity(teacher, params)
            v_reference = self.reference.evaluate(functools.partial(rows.velocity, self._pipeline, params))
            v = rows.velocity(self._pipeline, params)
            loss_R = velocity_distance(v, v_teacher)
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_R)
            metrics.mean("distillation/velocity_distance", loss_R)
            for step in sorted(set(steps.tolist())):
                metrics.mean(f"distillation/velocity_distance/ts_{step}", loss_R[(steps == step).to(loss_R.device)])
            if v_reference is not None:
                loss_R = loss_R + self.reference.penalty(velocity_distance(v, v_reference), metrics, loss=loss_R)
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """sample_R and step_R of the rows that train, [R] int64 each on the CPU, the same at every call."""
        names = [f"r{self.num_rollouts}:{sample}::steps" for sample in micro.track.sample_ids]
        return drawn_rows(names, self.seed, micro.segment.num_steps, self._num_trained_steps(micro.track))

    def _num_trained_steps(self, track: RolloutTrack) -> int:
        return num_trained_steps(track, self.num_timesteps, type(self).__name__)
