"""Credit assignment: how the advantage of a sample is spread over its denoising steps. Pure functions of the schedule.

Legend: T steps of the schedule, S of them stochastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.segments import LatentSegment


class StepCredit(Protocol):
    """Weights of the steps; an algorithm multiplies a sample's advantage by the weight of each step."""

    def weights(self, segment: LatentSegment, pipeline: DiffusionPipeline) -> Tensor:
        """[T] float32, mean 1 over the stochastic steps, so that the size of the gradient does not change with it."""
        ...


@dataclass(frozen=True)
class NoiseCredit:
    """Weights proportional to the standard deviation of the noise that the kernel adds at each stochastic step.

    A step explores as far as its noise reaches, so the noisy steps decide most: the early ones for the Flow kernel.
    Source: the noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324), there up to a constant factor.
    """

    def weights(self, segment: LatentSegment, pipeline: DiffusionPipeline) -> Tensor:
        """See `StepCredit.weights`; 0 for the deterministic steps. Raises ConfigError if no step has noise."""
        std_S = pipeline.step_std(segment)
        if not bool(std_S.sum() > 0):
            raise ConfigError(
                f"algorithm.credit weights steps by their noise, and the stochastic steps {segment.sde_indices} of the "
                f"{pipeline.strategy_name} kernel have none. Raise sampling.eta, or choose other steps."
            )
        weights = torch.zeros(segment.num_steps)
        weights[segment.sde_indices] = std_S / std_S.mean()
        return weights


@dataclass(frozen=True)
class VelocityCredit:
    """Weights that give the gradient of the velocity the same size at every stochastic step: std / |d mean / d v|.

    The score of a step by its velocity is (d mean / d v) noise / std, so steps of little noise have the largest
    gradients, which say nothing about how much they matter. For an SDE kernel the weight is
    1 / [sqrt(-dt) / q + q sqrt(-dt) (1 - sigma) / (2 sigma)], the temporal gradient rectification of Flash-GRPO (arXiv
    2605.15980), there divided by the mean over the candidate steps as here.
    """

    def weights(self, segment: LatentSegment, pipeline: DiffusionPipeline) -> Tensor:
        """See `StepCredit.weights`; 0 for the deterministic steps. Raises ConfigError if no step has noise."""
        std_S, gain_S = pipeline.step_std(segment), pipeline.step_gain(segment).abs()
        if not bool(std_S.sum() > 0):
            raise ConfigError(
                f"algorithm.credit weights steps by their noise, and the stochastic steps {segment.sde_indices} of the "
                f"{pipeline.strategy_name} kernel have none. Raise sampling.eta, or choose other steps."
            )
        weights = torch.zeros(segment.num_steps)
        weights[segment.sde_indices] = std_S / gain_S / (std_S / gain_S).mean()
        return weights


@dataclass(frozen=True)
class FixedCredit:
    """Weights written down, one per step of the schedule; they are scaled to mean 1 over the stochastic steps."""

    steps: Sequence[float]

    def __post_init__(self) -> None:
        if any(weight < 0 for weight in self.steps) or not any(self.steps):
            raise ConfigError(f"credit weights must be at least 0 and not all 0, got {list(self.steps)}")

    def weights(self, segment: LatentSegment, pipeline: DiffusionPipeline) -> Tensor:
        """See `StepCredit.weights`. Raises ConfigError if the schedule has another number of steps."""
        if len(self.steps) != segment.num_steps:
            raise ConfigError(f"algorithm.credit.steps has {len(self.steps)} weights for {segment.num_steps} steps")
        raw = torch.tensor(list(self.steps), dtype=torch.float32)
        mean = raw[segment.sde_indices].mean()
        if mean == 0:
            raise ConfigError(f"algorithm.credit.steps gives no weight to the stochastic steps {segment.sde_indices}")
        return raw / mean
