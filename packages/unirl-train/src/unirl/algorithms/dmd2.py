"""DMD2: a sampler of few steps is trained until its images are distributed as the teacher's, whatever their steps.

Two scores are compared where the student's images x are noised to x_s = (1 - s) x + s eps: the teacher's, which is the
model as before training, and a fake one, a copy of the student that learns by flow matching what the student makes.
Their difference is the gradient of KL(student || teacher) at x, and goes back through one step of the student alone:

    g = (x_fake - x_real) / max(mean |x - x_real|, 1e-6),  L = 1/2 mean (x - sg(x - g))^2,  dL/dx = g / numel

with the clean latents x_fake = x_s - s v_fake and x_real = x_s - s v_real that both velocities imply. Trajectory
distribution matching (`matching: trajectory`) noises the student's next latent instead of its image.
Legend: B samples, T steps of the student, K of them trained per sample, R = B K rows (sample-major).
Sources: Yin et al. 2024 (arXiv 2405.14867), without its GAN; the normalised g is that of DMD (arXiv 2311.18828). For
the other matching see `unirl.algorithms.trajectory_matching`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, row_chunks, sampled_with
from unirl.algorithms.forward_process import nearest_steps
from unirl.algorithms.losses import same_shape, velocity_distance
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.algorithms.trajectory_matching import (
    Matching,
    StepLevels,
    TrajectoryLevels,
    clean_target,
    next_latent,
    raised,
)
from unirl.algorithms.trajectory_rows import TrajectoryRows, drawn_rows, num_trained_steps
from unirl.sde.forward import interpolate, predict_x0, velocity_target
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.bounds import Bounds, OpenUnitInterval, PositiveInt, PositiveOrInf, Seed, bounded
from unirl.types.conditions import NEGATIVE
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions, DiffusionPipeline
from unirl.types.protocols.training import CopyTrainer
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.training import OptimizerConfig

GuidanceScale = Annotated[float, Bounds(ge=1)]

FAKE = "fake"
"""Name of the copy that is the fake score."""
SMALLEST_DISTANCE = 1e-6
"""Least mean distance from the teacher's clean latent that g is divided by."""


def matching_direction(x: Tensor, x_fake: Tensor, x_real: Tensor) -> Tensor:
    """g = (x_fake - x_real) / max(mean |x - x_real|, 1e-6), the mean over the elements of each row; [R, ...]."""
    same_shape(x=x, x_fake=x_fake, x_real=x_real)
    distance = (x - x_real).abs().mean(dim=tuple(range(1, x.ndim)), keepdim=True)
    return (x_fake - x_real) / distance.clamp(min=SMALLEST_DISTANCE)


def matching_loss(x: Tensor, direction: Tensor) -> Tensor:
    """1/2 mean (x - sg(x - g))^2 per row [R], whose gradient at x is g / numel of the row."""
    same_shape(x=x, direction=direction)
    target = (x - direction).detach()
    return 0.5 * (x - target).square().mean(dim=tuple(range(1, x.ndim)))


@dataclass(frozen=True)
class NoisedRows:
    """Some rows, noised: what both scores are asked at."""

    x_s: Tensor
    target: Tensor
    """What the fake score regresses to: noise - x, or (x_s - x) / s where a next latent was noised."""
    level_R: Tensor
    conditions: Conditions
    step_R: Tensor


@bounded("algorithm")
class DMD2(PenalisedAlgorithm):
    """Distribution matching with a fake score that trains before each update of the student. Advantages are not used.

    An image of a sample is x = x_n - sigma_n v(x_n, sigma_n) at a step n of its own trajectory, whatever the sampler.
    The teacher is the model as before training: the base of LoRA, or backend.keep_reference.

    fake_optimizer: AdamW of the fake score, under the backend's schedule. fake_max_grad_norm: its own clipping.
    fake_updates: its steps before each step of the student, each on all images of that step with fresh noise.
    teacher_guidance: classifier-free guidance of the teacher; 1 for none. The fake score has none.
    num_timesteps: K, steps drawn without repetition for each sample. min_level, max_level: noise levels of both scores
        are uniform between them. rows_per_forward: memory knob.
    matching: where both scores are compared, `samples` at the student's images noised, `trajectory` at its next latents
        noised further (TDM), of deterministic Euler steps.
    trajectory_levels: of the levels of a next latent; `step` draws those of its own step, from its level up to that
        before the step (TDM), so that no level is of two steps, `above` up to max_level (TDM-R1).
    Draws are made from counters (rollout, update, sample id), so they depend on neither devices nor batching.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.dmd2_rules"
    requires_reference: ClassVar[bool] = True
    takes_stale_samples: ClassVar[bool] = True
    trains_copies: ClassVar[bool] = True
    trained_rows: ClassVar[str | int | None] = "num_timesteps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: CopyTrainer,
        *,
        fake_optimizer: OptimizerConfig,
        fake_max_grad_norm: PositiveOrInf = 1.0,
        fake_updates: PositiveInt = 2,
        teacher_guidance: GuidanceScale = 4.0,
        num_timesteps: PositiveInt = 1,
        min_level: OpenUnitInterval = 0.02,
        max_level: OpenUnitInterval = 0.98,
        matching: Matching = "samples",
        trajectory_levels: TrajectoryLevels = "step",
        rows_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if min_level >= max_level:
            raise ConfigError(
                f"algorithm.min_level = {min_level} must be below algorithm.max_level = {max_level}: noise levels are "
                "drawn between them."
            )
        super().__init__(ReferenceKL(policies), seed=seed)
        self._pipeline = pipeline
        self._policies = policies
        self.fake_optimizer = fake_optimizer
        self.fake_max_grad_norm = fake_max_grad_norm
        self.fake_updates = fake_updates
        self.teacher_guidance = teacher_guidance
        self.num_timesteps = num_timesteps
        self.min_level = min_level
        self.max_level = max_level
        self.matching: Matching = matching
        self.trajectory_levels: TrajectoryLevels = trajectory_levels
        self.rows_per_forward = rows_per_forward
        self._params = params
        self._made: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        """Images of the update that is about to be trained, by update and samples."""

    def prepare(self) -> None:
        """Keep the starting weights as the fake score, which trains from there."""
        super().prepare()
        self._policies.train_copy(FAKE, self.fake_optimizer, max_grad_norm=self.fake_max_grad_norm)

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times trained steps."""
        return track.batch_size * num_trained_steps(track, self.num_timesteps, type(self).__name__)

    def before_update(self, micros: Sequence[MicroBatch]) -> RowMetrics:
        """Train the fake score on the images that the present student makes."""
        num_rows = sum(self.num_terms(micro.track) for micro in micros)
        self._made = {}
        for micro in micros:
            sample_R, step_R = self.rows(micro)
            with torch.no_grad():
                made = [self._images(micro, sample_R[rows], step_R[rows]) for rows in self._chunks(micro)]
            self._made[_key(micro)] = torch.cat(made)
        metrics = RowMetrics()
        for number in range(self.fake_updates):
            losses = [
                functools.partial(self._fake_loss, micro, rows, f"fake{number}", metrics)
                for micro in micros
                for rows in self._chunks(micro)
            ]
            stats = self._policies.copy_step(FAKE, losses, num_rows)
            metrics.add("dmd2/fake_grad_norm", torch.tensor(stats.grad_norm), 1)
            metrics.add("dmd2/fake_skipped_fraction", torch.tensor(float(stats.is_skipped)), 1)
        return metrics

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part per chunk of rows: sum over (sample, step) of the loss."""
        made_R = self._made.pop(_key(micro), None)
        if made_R is None:
            raise ContractError("the fake score was not trained on these samples: call before_update first")
        sample_R, step_R = self.rows(micro)
        for rows in self._chunks(micro):
            metrics = RowMetrics()
            direction = self._direction(micro, rows, made_R[rows], metrics)
            x = self._images(micro, sample_R[rows], step_R[rows])
            loss_R = matching_loss(x, direction)
            metrics.mean("policy/loss", loss_R)
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """sample_R and step_R of the rows that train, [R] int64 each on the CPU, the same at every call."""
        names = [f"{key}::steps" for key in self._keys(micro)]
        return drawn_rows(names, self.seed, micro.segment.num_steps, self.num_timesteps)

    def noised(
        self, micro: MicroBatch, rows: slice, x: Tensor, purpose: str, *, min_level: float | None = None
    ) -> NoisedRows:
        """The images x [R', ...] of these rows, or the next latents that they imply, at noise levels drawn for
        `purpose`, between min_level (None: the option) and max_level."""
        lowest = self.min_level if min_level is None else min_level
        keys, count = self._keys(micro), self.num_timesteps
        row_R = torch.arange(len(keys) * count)[rows]
        samples, own = row_R // count, (torch.arange(len(row_R)), row_R % count)
        names = [f"{keys[sample]}::{purpose}" for sample in samples.tolist()]
        draws_R = keyed_uniform([f"{name}::levels" for name in names], self.seed, (count,))[own]
        noise = keyed_normal([f"{name}::noise" for name in names], self.seed, (count, *x.shape[1:]))[own].to(x)
        conditions = {name: item.select(samples) for name, item in micro.track.conditions.items()}
        if self.matching == "samples":
            level_R = (lowest + (self.max_level - lowest) * draws_R).to(x.device)
            x_s, target = interpolate(x, noise, level_R), velocity_target(x, noise)
        else:
            before = TrajectoryRows.of(micro, samples, self.rows(micro)[1][rows])
            at = StepLevels(before.sigma_R, micro.segment.sigmas.to(x.device)[before.step_R + 1])
            level_R = at.drawn(draws_R.to(x.device), lowest, self.max_level, levels=self.trajectory_levels)
            x_s = raised(next_latent(before.x_R, x, at), noise, at.after, level_R)
            target = clean_target(x_s, x, level_R)
        return NoisedRows(x_s, target, level_R, conditions, nearest_steps(micro.segment, level_R))

    def _direction(self, micro: MicroBatch, rows: slice, x: Tensor, metrics: RowMetrics) -> Tensor:
        """g at the images x, without gradients; both scores are asked at the same noised latents."""
        params = self._sampled(micro)
        at = self.noised(micro, rows, x, "student")
        with torch.no_grad():
            with self._policies.using_policy(FAKE):
                v_fake = self._velocity(at, at.conditions, dataclasses.replace(params, guidance_scale=1.0))
            guided = dataclasses.replace(params, guidance_scale=self.teacher_guidance)
            conditions = {**at.conditions, **self._negatives(micro, rows, guided)}
            with self._policies.reference_policy():
                v_real = self._velocity(at, conditions, guided)
            x_fake, x_real = (predict_x0(at.x_s, v, at.level_R) for v in (v_fake, v_real))
            direction = matching_direction(x, x_fake, x_real)
        metrics.mean("dmd2/score_distance", velocity_distance(v_fake, v_real))
        metrics.mean("dmd2/teacher_distance", (x - x_real).abs().flatten(1).mean(dim=1))
        return direction

    def _fake_loss(self, micro: MicroBatch, rows: slice, purpose: str, metrics: RowMetrics) -> Tensor:
        """Sum over rows of mean (v_fake - target)^2."""
        at = self.noised(micro, rows, self._made[_key(micro)][rows], purpose)
        v = self._velocity(at, at.conditions, dataclasses.replace(self._sampled(micro), guidance_scale=1.0))
        loss_R = velocity_distance(v, at.target)
        metrics.mean("dmd2/fake_loss", loss_R)
        return loss_R.sum()

    def _images(self, micro: MicroBatch, samples: Tensor, steps: Tensor) -> Tensor:
        """x [R', ...] float32 that the student makes of its own latents at these steps."""
        own = TrajectoryRows.of(micro, samples, steps)
        return predict_x0(own.x_R, own.velocity(self._pipeline, self._sampled(micro)), own.sigma_R)

    def _velocity(self, at: NoisedRows, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        return self._pipeline.velocity(conditions, at.x_s, at.level_R, at.step_R, params).float()

    def _negatives(self, micro: MicroBatch, rows: slice, guided: DiffusionSamplingParams) -> Conditions:
        """What a guided teacher reads besides the student's conditions, where these do not hold it."""
        if not guided.uses_guidance or any(name.startswith(NEGATIVE) for name in micro.track.conditions):
            return {}
        samples = torch.arange(self.num_terms(micro.track))[rows] // self.num_timesteps
        with self._pipeline.evaluating():
            encoded = self._pipeline.encode_texts(micro.track.select(samples.tolist()).primitives, guided)
        return {
            name: item.to(micro.segment.latents.device) for name, item in encoded.items() if name.startswith(NEGATIVE)
        }

    def _sampled(self, micro: MicroBatch) -> DiffusionSamplingParams:
        return sampled_with(micro.segment.params, self._params)

    def _keys(self, micro: MicroBatch) -> list[str]:
        return [f"r{self.num_rollouts}:u{micro.update}:{sample}" for sample in micro.track.sample_ids]

    def _chunks(self, micro: MicroBatch) -> list[slice]:
        return row_chunks(self.num_terms(micro.track), self.rows_per_forward)


def _key(micro: MicroBatch) -> tuple[int, tuple[str, ...]]:
    return micro.update, tuple(micro.track.sample_ids)
