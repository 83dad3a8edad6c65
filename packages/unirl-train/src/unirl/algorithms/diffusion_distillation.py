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

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, row_chunks, sampled_with
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.algorithms.teacher import require_same_latents
from unirl.sde.noise import keyed_permutation
from unirl.types.bounds import NonNegative, PositiveInt, Seed, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions, DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


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
            samples, steps = sample_R[chunk], step_R[chunk]
            slots = torch.tensor([segment.slot_of(step) for step in steps.tolist()])
            x_R = segment.latents[samples, slots].float()
            sigma_R = segment.sigmas.to(x_R.device)[steps.to(x_R.device)]
            conditions = {name: item.select(samples) for name, item in micro.track.conditions.items()}

            def velocity(
                pipeline: DiffusionPipeline,
                conditions: Conditions = conditions,
                x_R: Tensor = x_R,
                sigma_R: Tensor = sigma_R,
                steps: Tensor = steps,
            ) -> Tensor:
                return pipeline.velocity(conditions, x_R, sigma_R, steps.to(x_R.device), params).float()

            with teacher.evaluating():
                v_teacher = velocity(teacher)
            v_reference = self.reference.evaluate(functools.partial(velocity, self._pipeline))
            v = velocity(self._pipeline)
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
        num_steps, num_trained = micro.segment.num_steps, self._num_trained_steps(micro.track)
        names = [f"r{self.num_rollouts}:{sample}::steps" for sample in micro.track.sample_ids]
        step_BK = torch.stack([keyed_permutation(name, self.seed, num_steps)[:num_trained] for name in names])
        sample_R = torch.arange(len(names)).repeat_interleave(num_trained)
        return sample_R, step_BK.sort(dim=1).values.flatten()

    def _num_trained_steps(self, track: RolloutTrack) -> int:
        segment = track.segment
        if not isinstance(segment, LatentSegment):
            raise ContractError(f"DiffusionDistillation trains latent tracks, this one holds {type(segment).__name__}")
        missing = [step for step in range(segment.num_steps) if step not in segment.indices]
        if missing:
            raise ContractError(
                f"the latents before the steps {missing} were not kept. Set sampling.keep_latents: all."
            )
        if self.num_timesteps is not None and self.num_timesteps > segment.num_steps:
            raise ConfigError(
                f"algorithm.num_timesteps = {self.num_timesteps} exceeds the {segment.num_steps} steps of the rollout. "
                "Lower it or raise sampling.num_inference_steps."
            )
        return self.num_timesteps or segment.num_steps
