"""Policies that act by a flow whose noise is learned: every step is Gaussian, with deviations that a network chooses.

The chain from noise to moves then is a Markov chain with a density in closed form, of which a decision is one term.
Source: pi_RL (arXiv 2510.25889), Flow-Noise.
Legend: see `unirl.models.action.heads`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.heads import ChunkStats, executed, transition_rows
from unirl.models.action.pipeline import FlowActionPipeline
from unirl.sde.likelihood import gaussian_log_density
from unirl.sde.noise import keyed_normal
from unirl.sde.solvers import euler_step
from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.errors import ConfigError, ContractError
from unirl.types.sampling import ActionSamplingParams

ENTROPY_OF_UNIT = 0.5 * math.log(2 * math.pi * math.e)
"""Nats of a Gaussian of deviation 1."""


class FlowNoiseActionPipeline(FlowActionPipeline):
    """Chunks by flow matching whose stochastic steps are Euler's with learned noise:
    x' = x + v dt + eta std(x, sigma, observation) e.

    The one term of a decision is log p(x_K) + sum over steps of log N(x'; x + v dt, (eta std)^2), summed over the
    numbers of executed moves; x_K is the noise that the chain begins from.
    Raises ConfigError for a policy without the network that chooses the deviations.
    """

    learns_noise: ClassVar[bool] = True

    def __init__(self, bundle: ActionBundle) -> None:
        super().__init__(bundle)
        if bundle.config.noise_range is None:
            raise ConfigError(
                f"{type(self).__name__}: this policy learns no noise. Set bundle.noise_range, such as [0.08, 0.16]."
            )

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        """The noise levels, the stochastic steps, and that a chain is one term."""
        return {**super().segment_fields(params), "is_joint": True}

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        """A chunk for each observation."""
        sigmas, steps = self._sigmas(params), set(params.stochastic_steps)
        noise = keyed_normal(noise_keys, params.seed, (len(sigmas), *self.chunk_shape)).to(self._bundle.device)
        features = self.features(seen)
        x = noise[:, 0]
        chain, densities = [x], [_of_unit(x)]
        for step in range(len(sigmas) - 1):
            sigma_R, sigma_next_R = (sigmas[at].to(x.device).expand(len(x)) for at in (step, step + 1))
            mean, std = self._transition(features, None, x, sigma_R, sigma_next_R, params.eta)
            x = mean
            if step in steps:
                x = mean + std * noise[:, step + 1]
                densities.append(gaussian_log_density(x, mean, std))
            chain.append(x)
        return DrawnChunks(
            moves=x.clamp(-1, 1),
            chains=torch.stack(chain, dim=1),
            densities=torch.stack(densities, dim=1) if steps else None,
        )

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        """[n, 1], summed over the steps and the executed moves of [n, S + 1, H, D]."""
        return super().log_probs(densities, num_moves).sum(dim=1, keepdim=True)

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> ChunkStats:
        """One forward of all n S rows."""
        steps = segment.sde_indices
        if segment.chains is None or segment.sigmas is None or not segment.is_joint:
            raise ContractError("this segment holds no chains of one term each; learned noise replays those")
        if not steps:
            raise ConfigError("a chunk without stochastic steps cannot be replayed. Set sampling.eta above 0.")
        decision_N = decision_N.to(segment.chains.device)
        features = self.features(segment.observations().select(decision_N))
        chains, num_moves = segment.chains[decision_N], segment.num_moves[decision_N]
        rows = transition_rows(chains, steps, segment.sigmas)
        mean, std = self._transition(features, rows.row_R, rows.x, rows.sigma_R, rows.sigma_next_R, params.eta)
        stepped = gaussian_log_density(rows.following, mean, std).unflatten(0, (len(chains), -1))
        densities = torch.cat([_of_unit(chains[:, :1]), stepped], dim=1)
        entropies = (std.log() + ENTROPY_OF_UNIT).unflatten(0, (len(chains), -1))
        is_executed = executed(num_moves, entropies.shape[2])[:, None, :, None]
        entropy_N = torch.where(is_executed, entropies, 0.0).flatten(1).sum(dim=1)
        return ChunkStats(self.log_probs(densities, num_moves), entropy_N[:, None], features)

    def _transition(
        self, features: Tensor, row_R: Tensor | None, x: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, eta: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and deviation [R, H, D] float32 of the next position."""
        _, velocity, std = self._network(features=features, row_R=row_R, x=x, sigma_R=sigma_R)
        assert velocity is not None and std is not None  # noqa: S101 - x was given, and the head learns noise
        return euler_step(x, velocity, sigma_R, sigma_next_R), std * eta


def _of_unit(x: Tensor) -> Tensor:
    """log N(x; 0, 1) of every number."""
    return gaussian_log_density(x, torch.zeros_like(x), torch.ones_like(x))
