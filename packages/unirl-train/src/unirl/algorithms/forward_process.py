"""What the methods on the forward process share: noise levels, noised samples, and velocities of any policy there.

They need no stochastic sampler and no log-prob: a clean sample is noised to some levels and the model is asked there.
Legend: B samples, K noise levels per sample, R = B K rows: sample after sample, level after level; where samples form
units (the two of a preference pair), unit after unit, level after level, and the unit's samples next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import (
    MicroBatch,
    RowMetrics,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.sde.forward import interpolate, velocity_target
from unirl.sde.noise import keyed_normal, keyed_permutation, keyed_uniform
from unirl.types.bounds import NonNegative, PositiveFraction, PositiveInt, Seed, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

TimestepSampler = Literal["rollout", "uniform", "logit_normal"]


@dataclass(frozen=True)
class ForwardRows:
    """R noised samples, and the model there."""

    sample_R: Tensor
    """[R] int64, row of the micro-batch."""
    x0: Tensor
    """[R, ...] float32 clean latents."""
    x_t: Tensor
    """[R, ...] float32 (1 - sigma) x0 + sigma noise."""
    target: Tensor
    """[R, ...] float32 noise - x0, what flow matching regresses to."""
    sigma_R: Tensor
    """[R] float32 noise levels."""
    velocity: Callable[[], Tensor]
    """velocity() -> [R, ...] float32 under whatever weights the model holds; gradients where they are on."""


@bounded("algorithm")
class ForwardProcessAlgorithm(PenalisedAlgorithm):
    """Base of the methods on the forward process.

    num_timesteps: noise levels trained a sample; None takes int(timestep_fraction * T).
    timestep_sampler: "rollout" draws without repetition from the rollout's own levels (the terminal 0 excluded),
        "uniform" and "logit_normal" draw continuously from (0, 1).
    kl_coef, adaptive_kl: penalty mean (v - v_ref)^2, see `ReferenceKL`; 0 switches the reference off.
    rows_per_forward: memory knob.
    Noise and levels are drawn from counters (rollout, sample id), so they depend on neither devices nor batching.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.forward_process_rules"
    takes_stale_samples: ClassVar[bool] = True
    trained_rows: ClassVar[str | int | None] = "num_timesteps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_timesteps: PositiveInt | None = None,
        timestep_fraction: PositiveFraction = 0.99,
        timestep_sampler: TimestepSampler = "rollout",
        kl_coef: NonNegative = 0.0,
        adaptive_kl: AdaptiveKL | None = None,
        rows_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if num_timesteps is None and timestep_sampler != "rollout":
            raise ConfigError(f"algorithm.num_timesteps is needed with timestep_sampler: {timestep_sampler}")
        if rows_per_forward is not None and rows_per_forward % self.samples_per_unit:
            raise ConfigError(
                f"algorithm.rows_per_forward = {rows_per_forward} must be a multiple of {self.samples_per_unit}, the "
                "samples that belong together, or null"
            )
        super().__init__(ReferenceKL(policies, coef=kl_coef, adaptive=adaptive_kl), seed=seed)
        self._pipeline = pipeline
        self._policies = policies
        self.num_timesteps = num_timesteps
        self.timestep_fraction = timestep_fraction
        self.timestep_sampler: TimestepSampler = timestep_sampler
        self.rows_per_forward = rows_per_forward
        self._params = params

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times noise levels."""
        return track.batch_size * self.num_levels(track.segment)

    def num_levels(self, segment: object) -> int:
        """K. Raises ConfigError if the segment holds no latents or too few levels."""
        if not isinstance(segment, LatentSegment):
            raise ConfigError(f"{type(self).__name__} trains latent tracks, this one holds {type(segment).__name__}")
        if self.timestep_sampler != "rollout":
            return int(self.num_timesteps or 1)
        available = segment.num_steps
        if self.num_timesteps is None:
            return max(int(available * self.timestep_fraction), 1)
        if self.num_timesteps > available:
            raise ConfigError(
                f"algorithm.num_timesteps = {self.num_timesteps} exceeds the {available} levels of the rollout. "
                "Lower it or raise sampling.num_inference_steps."
            )
        return self.num_timesteps

    def noise_keys(self, track: RolloutTrack) -> list[str]:
        """What the draws of each sample are named after; equal keys share levels and noise."""
        return [f"r{self.num_rollouts}:{sample}" for sample in track.sample_ids]

    def levels(self, keys: list[str], segment: LatentSegment) -> Tensor:
        """Noise levels [B, K] in (0, 1] for the samples with these noise keys."""
        num_levels = self.num_levels(segment)
        names = [f"{key}::levels" for key in keys]
        if self.timestep_sampler == "rollout":
            rows = [keyed_permutation(name, self.seed, segment.num_steps)[:num_levels] for name in names]
            return segment.sigmas[torch.stack(rows)]
        if self.timestep_sampler == "uniform":
            return 1.0 - keyed_uniform(names, self.seed, (num_levels,))
        # torch's sigmoid rounds the last elements of a tensor differently: one sample at a time, whatever the batch.
        return torch.stack([row.sigmoid() for row in keyed_normal(names, self.seed, (num_levels,))])

    def forward_rows(self, micro: MicroBatch) -> Iterator[tuple[slice, ForwardRows]]:
        """The rows of a micro-batch, `rows_per_forward` at a time, with their place among all of its rows."""
        segment = micro.segment
        params = sampled_with(segment.params, self._params)
        x0_B = segment.clean_latents.float()
        device = x0_B.device
        keys = self.noise_keys(micro.track)
        sigma_R = self.levels(keys, segment).to(device).flatten()
        num_levels = self.num_levels(segment)
        shape = (num_levels, *x0_B.shape[1:])
        noise = keyed_normal([f"{key}::noise" for key in keys], self.seed, shape).to(device).flatten(0, 1)
        order_R = unit_order(x0_B.shape[0], num_levels, self.samples_per_unit)
        owner_R = order_R // num_levels  # conditions are selected by what the host knows, without waiting for a GPU
        place_R, sample_R = order_R.to(device), owner_R.to(device)
        sigma_R = sigma_R[place_R]
        step_R = nearest_steps(segment, sigma_R)
        for rows in row_chunks(sample_R.numel(), self.rows_per_forward):
            x0, eps = x0_B[sample_R[rows]], noise[place_R[rows]]
            x_t = interpolate(x0, eps, sigma_R[rows])
            conditions = {name: item.select(owner_R[rows]) for name, item in micro.track.conditions.items()}

            def velocity(x_t=x_t, rows=rows, conditions=conditions) -> Tensor:
                return self._pipeline.velocity(conditions, x_t, sigma_R[rows], step_R[rows], params).float()

            yield rows, ForwardRows(sample_R[rows], x0, x_t, velocity_target(x0, eps), sigma_R[rows], velocity)

    def reference_penalty(self, v: Tensor, v_reference: Tensor | None, metrics: RowMetrics, *, loss: Tensor) -> Tensor:
        """kl_coef * mean (v - v_ref)^2 a row [R], reported; 0 where the reference is off. loss: what it is added to."""
        if v_reference is None:
            return torch.zeros(v.shape[0], device=v.device)
        return self.reference.penalty(velocity_distance(v, v_reference), metrics, loss=loss)


class GroupedForwardProcess(ForwardProcessAlgorithm):
    """Base of the methods on the forward process that compare samples of one prompt (`samples_per_unit`).

    All samples of a unit get the same noise and levels, so what differs between them is theirs. A term of the loss is a
    (unit, level). Everything else: see `ForwardProcessAlgorithm`.
    """

    def num_terms(self, track: RolloutTrack) -> int:
        """Units times noise levels."""
        return super().num_terms(track) // self.samples_per_unit

    def noise_keys(self, track: RolloutTrack) -> list[str]:
        """Named after the group: all samples of a unit are noised alike. Raises ContractError for mixed units."""
        groups, size = track.group_ids, self.samples_per_unit
        for start in range(0, len(groups), size):
            if len(set(groups[start : start + size])) > 1:
                raise ContractError(
                    f"the {size} samples that {type(self).__name__} compares must come from one group, got "
                    f"{groups[start : start + size]}. Set selection.best_of: {size}, or sampling.samples_per_prompt: "
                    f"{size} without selection."
                )
        return [f"r{self.num_rollouts}:{group}" for group in groups]


def unit_order(num_samples: int, num_levels: int, samples_per_unit: int) -> Tensor:
    """Places in a sample-major [B, K] of the rows in the order (unit, level, sample of the unit), int64 [B K].

    Raises ContractError if the samples do not divide into units.
    """
    if num_samples % samples_per_unit:
        raise ContractError(f"{num_samples} samples do not divide into units of {samples_per_unit}")
    places = torch.arange(num_samples * num_levels)
    return places.view(-1, samples_per_unit, num_levels).transpose(1, 2).flatten()


def nearest_steps(segment: LatentSegment, sigma_R: Tensor) -> Tensor:
    """Index of the rollout step whose level is nearest, [R]: what a model with per-step state is told."""
    levels = segment.sigmas[:-1].to(sigma_R.device)
    return (sigma_R[:, None] - levels[None, :]).abs().argmin(dim=1)
