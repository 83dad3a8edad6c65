"""The steps of a sample's own trajectory that train, and what a model is asked there.

Legend: T steps, K of them trained per sample, R rows (sample-major).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.sde.noise import keyed_permutation
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions, DiffusionPipeline
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


def num_trained_steps(track: RolloutTrack, asked: int | None, name: str) -> int:
    """K, of which None asks for all. name: of the algorithm.

    Raises ContractError for a track without the latents of every step, ConfigError for more steps than there are.
    """
    segment = track.segment
    if not isinstance(segment, LatentSegment):
        raise ContractError(f"{name} trains latent tracks, this one holds {type(segment).__name__}")
    missing = [step for step in range(segment.num_steps) if step not in segment.indices]
    if missing:
        raise ContractError(f"the latents before the steps {missing} were not kept. Set sampling.keep_latents: all.")
    if asked is not None and asked > segment.num_steps:
        raise ConfigError(
            f"algorithm.num_timesteps = {asked} exceeds the {segment.num_steps} steps of the rollout. "
            "Lower it or raise sampling.num_inference_steps."
        )
    return asked or segment.num_steps


def drawn_rows(names: Sequence[str], seed: int, num_steps: int, num_trained: int) -> tuple[Tensor, Tensor]:
    """sample_R and step_R, [R] int64 each on the CPU: for each name K steps, drawn without repetition, in order."""
    step_BK = torch.stack([keyed_permutation(name, seed, num_steps)[:num_trained] for name in names])
    sample_R = torch.arange(len(names)).repeat_interleave(num_trained)
    return sample_R, step_BK.sort(dim=1).values.flatten()


@dataclass(frozen=True)
class TrajectoryRows:
    """Latents of some rows before their steps, and what they are asked with."""

    x_R: Tensor
    """[R, ...] float32."""
    sigma_R: Tensor
    step_R: Tensor
    conditions: Conditions

    @classmethod
    def of(cls, micro: MicroBatch, samples: Tensor, steps: Tensor) -> Self:
        """The rows with these samples and steps, [R] each on the CPU."""
        segment = micro.segment
        slots = torch.tensor([segment.slot_of(step) for step in steps.tolist()])
        x_R = segment.latents[samples, slots].float()
        step_R = steps.to(x_R.device)
        conditions = {name: item.select(samples) for name, item in micro.track.conditions.items()}
        return cls(x_R, segment.sigmas.to(x_R.device)[step_R], step_R, conditions)

    def velocity(self, pipeline: DiffusionPipeline, params: DiffusionSamplingParams) -> Tensor:
        """[R, ...] float32, of the weights that the pipeline computes with."""
        return pipeline.velocity(self.conditions, self.x_R, self.sigma_R, self.step_R, params).float()
