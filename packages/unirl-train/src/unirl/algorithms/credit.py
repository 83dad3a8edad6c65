"""Credit assignment: how the advantage of a sample is spread over its denoising steps. Pure functions of the schedule.

Legend: T steps of the schedule, S of them stochastic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unirl.types.bounds import NonNegative, bounded
from unirl.types.errors import ConfigError
from unirl.types.segments import LatentSegment


class StepCredit(Protocol):
    """Weights of the steps; an algorithm multiplies a sample's advantage by the weight of each step."""

    def weights(self, segment: LatentSegment) -> Tensor:
        """[T] float32, mean 1 over the stochastic steps, so that the size of the gradient does not change with it."""
        ...


@bounded("credit")
@dataclass(frozen=True)
class NoiseCredit:
    """Weights proportional to (sigma - sigma_next)^power of each stochastic step: long, noisy steps decide most.

    power: 0 weights all steps alike; 0.5 is the standard deviation of a constant diffusion coefficient, as in the
    noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324).
    """

    power: NonNegative = 0.5

    def weights(self, segment: LatentSegment) -> Tensor:
        """See `StepCredit.weights`."""
        raw = (-segment.sigmas.diff()).pow(self.power)
        return raw / raw[segment.sde_indices].mean()


@dataclass(frozen=True)
class FixedCredit:
    """Weights written down, one per step of the schedule; they are scaled to mean 1 over the stochastic steps."""

    steps: Sequence[float]

    def __post_init__(self) -> None:
        if any(weight < 0 for weight in self.steps) or not any(self.steps):
            raise ConfigError(f"credit weights must be at least 0 and not all 0, got {list(self.steps)}")

    def weights(self, segment: LatentSegment) -> Tensor:
        """See `StepCredit.weights`. Raises ConfigError where the schedule has another number of steps."""
        if len(self.steps) != segment.num_steps:
            raise ConfigError(f"algorithm.credit.steps has {len(self.steps)} weights for {segment.num_steps} steps")
        raw = torch.tensor(list(self.steps), dtype=torch.float32)
        mean = raw[segment.sde_indices].mean()
        if mean == 0:
            raise ConfigError(f"algorithm.credit.steps gives no weight to the stochastic steps {segment.sde_indices}")
        return raw / mean
