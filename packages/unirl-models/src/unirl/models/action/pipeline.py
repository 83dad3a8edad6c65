"""Small policies that act, as the pipelines that recipes name: a flow over chunks of moves, or bins of their numbers.

Legend: see `unirl.models.action.heads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import Head
from unirl.models.action.heads import FlowPipeline, TokensPipeline, executed
from unirl.models.evaluation_mode import evaluating
from unirl.sde.forward import interpolate, velocity_target
from unirl.sde.kernels import SDEStrategy
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.errors import ConfigError, ContractError
from unirl.types.sampling import ActionSamplingParams


class FlowActionPipeline(FlowPipeline[ActionBundle, Tensor]):
    """A small policy with the head `flow`. strategy: see `FlowPipeline`."""

    imitates: ClassVar[bool] = True

    def __init__(self, bundle: ActionBundle, strategy: SDEStrategy | None = None) -> None:
        _require_head(bundle, self.head, type(self))
        super().__init__(bundle, strategy)
        if bundle.config.noise_range is not None and not self.learns_noise:
            raise ConfigError(
                f"bundle.noise_range = {list(bundle.config.noise_range)} adds a network that {type(self).__name__} "
                "does not use. Remove it, or set pipeline._target_ to "
                "unirl.models.action.noise_pipeline.FlowNoiseActionPipeline."
            )
        self._network = bundle.network

    def features(self, seen: Observations) -> Tensor:
        """[n, W], what it makes of observations."""
        return self._network(seen.images, seen.states)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def given(self, moves: Tensor, params: ActionSamplingParams) -> DrawnChunks:
        """Chunks that were shown, as chains that stand still."""
        chains = moves[:, None].expand(-1, params.num_inference_steps + 1, -1, -1).contiguous()
        return DrawnChunks(moves=moves, chains=chains)

    def imitation_loss(
        self, segment: ActionSegment, decision_N: Tensor, *, noise_keys: Sequence[str], seed: int
    ) -> Tensor:
        """[n], flow matching at one uniform level of noise for each chunk."""
        if segment.chains is None:
            raise ContractError("this segment holds tokens; a flow learns chains")
        decision_N = decision_N.to(segment.chains.device)
        chunks = segment.chains[decision_N, -1]
        noise = keyed_normal(noise_keys, seed, self.chunk_shape).to(chunks.device)
        sigma_N = keyed_uniform([f"{key}::level" for key in noise_keys], seed, ()).to(chunks.device)
        seen = segment.observations().select(decision_N)
        x = interpolate(chunks, noise, sigma_N)
        velocity = self._network(seen.images, seen.states, x=x, sigma_R=sigma_N)[1]
        assert velocity is not None  # noqa: S101 - x was given
        squared = (velocity.float() - velocity_target(chunks, noise)).square()
        return mean_of_executed(squared, segment.num_moves[decision_N])

    def _perceive(self, seen: Observations) -> tuple[Tensor, Tensor]:
        features = self.features(seen)
        return features, features

    def _velocity(self, seen: Tensor, row_R: Tensor | None, x: Tensor, sigma_R: Tensor) -> Tensor:
        found = self._network(features=seen, row_R=row_R, x=x, sigma_R=sigma_R)[1]
        assert found is not None  # noqa: S101 - x was given
        return found


class BinsActionPipeline(TokensPipeline[ActionBundle]):
    """A small policy with the head `bins`, which cut [-1, 1] evenly; a token stands for the middle of its bin."""

    imitates: ClassVar[bool] = True

    def __init__(self, bundle: ActionBundle) -> None:
        _require_head(bundle, self.head, type(self))
        super().__init__(bundle)
        self._network = bundle.network

    def features(self, seen: Observations) -> Tensor:
        """[n, W], what it makes of observations."""
        return self._network(seen.images, seen.states)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def given(self, moves: Tensor, params: ActionSamplingParams) -> DrawnChunks:
        """Chunks that were shown, as the bins in which they lie."""
        num_bins = self._bundle.config.num_bins
        return DrawnChunks(moves=moves, tokens=((moves + 1) / 2 * num_bins).long().clamp(0, num_bins - 1))

    def imitation_loss(
        self, segment: ActionSegment, decision_N: Tensor, *, noise_keys: Sequence[str], seed: int
    ) -> Tensor:
        """[n], cross entropy."""
        if segment.tokens is None:
            raise ContractError("this segment holds chains; a head with bins learns tokens")
        decision_N = decision_N.to(segment.tokens.device)
        _, logits = self._logits(segment.observations().select(decision_N))
        logp = logits.float().log_softmax(dim=-1).gather(-1, segment.tokens[decision_N][..., None])[..., 0]
        return mean_of_executed(-logp, segment.num_moves[decision_N])

    def _logits(self, seen: Observations) -> tuple[Tensor, Tensor]:
        features, logits, _ = self._network(seen.images, seen.states)
        assert logits is not None  # noqa: S101 - a head with bins always has them
        return features, logits

    def _moves(self, tokens: Tensor) -> Tensor:
        return ((tokens + 0.5) / self._bundle.config.num_bins * 2 - 1).float()


def mean_of_executed(values: Tensor, num_moves: Tensor) -> Tensor:
    """[n] of [n, H, D], over the numbers of executed moves."""
    is_executed = executed(num_moves, values.shape[1])[:, :, None]
    return torch.where(is_executed, values, 0.0).flatten(1).sum(dim=1) / (num_moves * values.shape[2])


def _require_head(bundle: ActionBundle, head: Head, pipeline: type) -> None:
    if bundle.config.head != head:
        raise ConfigError(
            f"the policy has the head {bundle.config.head}, {pipeline.__name__} samples from {head}. Set "
            f"pipeline._target_ to the pipeline of {bundle.config.head}."
        )
