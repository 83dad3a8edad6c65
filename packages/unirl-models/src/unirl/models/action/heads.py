"""What pipelines of policies that act share: a flow over chunks of moves, or tokens of their numbers.

Legend: n observations or decisions, S stochastic steps, R = n S rows (decision-major), K flow steps, H moves of a
chunk, D numbers of a move, L terms of a decision, W width of the features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from unirl.models.action.config import Head
from unirl.sde.kernels import FlowSDEStrategy, SDEStrategy
from unirl.sde.likelihood import gaussian_log_density
from unirl.sde.loop import replay, sample
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.errors import ConfigError, ContractError
from unirl.types.sampling import ActionSamplingParams

SeenT = TypeVar("SeenT")


@dataclass(frozen=True)
class ChunkStats:
    """Implements unirl.types.protocols.models.ActionStats."""

    logp_NL: Tensor
    entropy_NL: Tensor | None
    features_NW: Tensor


class ActingBundle(Protocol):
    """What pipelines ask of the bundle of a policy that acts, besides its network."""

    device: torch.device

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """H and D."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """[C, H, W] of the images that it sees; None if it sees none."""
        ...

    @property
    def state_size(self) -> int | None:
        """Numbers of the states that it reads; None if it reads none."""
        ...


BundleT = TypeVar("BundleT", bound=ActingBundle)


class BasePipeline(ABC, Generic[BundleT]):
    """What all heads share."""

    recipe_rules: ClassVar[str] = "unirl.models.action.pipeline_rules"
    head: ClassVar[Head]
    learns_noise: ClassVar[bool] = False
    """True if a network chooses the deviations of a flow's stochastic steps."""
    imitates: ClassVar[bool] = False
    """True if it learns moves that it is shown (`unirl.types.protocols.models.ImitatingPipeline`)."""

    def __init__(self, bundle: BundleT) -> None:
        self._bundle = bundle

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """H and D."""
        return self._bundle.chunk_shape

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """[C, H, W] of the images that it sees; None if it sees none."""
        return self._bundle.image_shape

    @property
    def state_size(self) -> int | None:
        """Numbers of the states that it reads; None if it reads none."""
        return self._bundle.state_size

    def encode_prompts(self, texts: Sequence[str]) -> Tensor | None:
        """None: it reads no texts."""
        return None

    @abstractmethod
    def features(self, seen: Observations) -> Tensor:
        """[n, W], what it makes of observations."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        """None but of a flow."""
        return {}

    @abstractmethod
    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        """[n, L], see unirl.types.protocols.models.ActionPipeline."""


def executed(num_moves: Tensor, length: int) -> Tensor:
    """[n, H] bool, the moves of a chunk of `length` that were executed."""
    return torch.arange(length, device=num_moves.device) < num_moves[:, None]


@dataclass(frozen=True)
class TransitionRows:
    """The stochastic steps of some chains, as R rows."""

    row_R: Tensor
    """int64, the chain."""
    step_R: Tensor
    """int64."""
    sigma_R: Tensor
    sigma_next_R: Tensor
    x: Tensor
    """[R, H, D], where the step began."""
    following: Tensor
    """[R, H, D], where it led."""


def transition_rows(chains: Tensor, steps: Sequence[int], sigmas: Tensor) -> TransitionRows:
    """Every step in `steps` of chains [n, K+1, H, D], on their device. sigmas: [K+1]."""
    row_R = torch.arange(len(chains), device=chains.device).repeat_interleave(len(steps))
    step_R = torch.tensor(steps, device=chains.device).repeat(len(chains))
    sigmas = sigmas.to(chains.device)
    x, following = chains[row_R, step_R], chains[row_R, step_R + 1]
    return TransitionRows(row_R, step_R, sigmas[step_R], sigmas[step_R + 1], x, following)


class FlowPipeline(BasePipeline[BundleT], Generic[BundleT, SeenT]):
    """Chunks by flow matching, noise at sigma 1 and moves at sigma 0, with stochastic steps (Flow-SDE) that have
    log-probs.

    strategy: the kernel of the stochastic steps, a Gaussian one; None is `FlowSDEStrategy`.
    A term is a stochastic step, whose log-prob is summed over the numbers of executed moves. A chain may have more
    moves and numbers than the chunk; these begin it, and the others have no part in the log-prob.
    Source: pi_RL (arXiv 2510.25889), Flow-SDE on the chunk.
    """

    head: ClassVar[Head] = "flow"

    def __init__(self, bundle: BundleT, strategy: SDEStrategy | None = None) -> None:
        super().__init__(bundle)
        self._strategy = FlowSDEStrategy() if strategy is None else strategy
        if not self._strategy.is_gaussian:
            raise ConfigError(
                f"pipeline.strategy: the {self._strategy.name} kernel has no density, of which a chunk sums that of "
                "executed moves. Take unirl.sde.kernels.FlowSDEStrategy."
            )

    @property
    def chain_shape(self) -> tuple[int, int]:
        """Moves of a chain and numbers of each."""
        return self.chunk_shape

    @abstractmethod
    def _perceive(self, seen: Observations) -> tuple[Tensor, SeenT]:
        """Features [n, W], and what the velocity takes of the observations."""

    @abstractmethod
    def _velocity(self, seen: SeenT, row_R: Tensor | None, x: Tensor, sigma_R: Tensor) -> Tensor:
        """[R, ...] of x. row_R: the observation of each row; None: row after row."""

    def _moves(self, x: Tensor) -> Tensor:
        """[n, H, D] in [-1, 1] of the ends of chains."""
        return x.clamp(-1, 1)

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        """The noise levels and the stochastic steps."""
        return {"sigmas": self._sigmas(params), "sde_indices": params.stochastic_steps}

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        """A chunk for each observation."""
        sigmas, steps = self._sigmas(params), params.stochastic_steps
        noise = keyed_normal(noise_keys, params.seed, (len(sigmas), *self.chain_shape)).to(self._bundle.device)
        _, context = self._perceive(seen)

        def velocity(x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            return self._velocity(context, None, x, sigma_R)

        drawn = sample(
            velocity,
            noise[:, 0],
            sigmas,
            strategy=self._strategy,
            eta=params.eta,
            sde_indices=steps,
            step_noise=lambda step: noise[:, step + 1],
            keep="all",
            keep_means=bool(steps),
        )
        densities = None
        if drawn.sde_means is not None:
            following = drawn.latents[:, [step + 1 for step in steps]]
            densities = self._densities(following.flatten(0, 1), drawn.sde_means.flatten(0, 1), params, len(noise))
        return DrawnChunks(moves=self._moves(drawn.latents[:, -1]), chains=drawn.latents, densities=densities)

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        """[n, S], summed over the executed moves of [n, S, H, D]."""
        is_executed = executed(num_moves, densities.shape[2])[:, None, :, None]
        return torch.where(is_executed, densities, 0.0).flatten(2).sum(dim=2)

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> ChunkStats:
        """One forward of all n S rows."""
        steps = segment.sde_indices
        if segment.chains is None or segment.sigmas is None:
            raise ContractError("this segment holds tokens; a flow replays chains")
        if not steps:
            raise ConfigError("a chunk without stochastic steps cannot be replayed. Set sampling.eta above 0.")
        decision_N = decision_N.to(segment.chains.device)
        features, context = self._perceive(segment.observations().select(decision_N))
        rows = transition_rows(segment.chains[decision_N], steps, segment.sigmas)

        def velocity(x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            return self._velocity(context, rows.row_R, x, sigma_R)

        replayed = replay(
            velocity,
            rows.x,
            rows.following,
            rows.sigma_R,
            rows.sigma_next_R,
            rows.step_R,
            strategy=self._strategy,
            eta=params.eta,
            sigma_max=float(segment.sigmas[1]),
        )
        densities = self._densities(rows.following, replayed.mean, params, len(decision_N))
        return ChunkStats(self.log_probs(densities, segment.num_moves[decision_N]), None, features)

    def _densities(self, y: Tensor, mean: Tensor, params: ActionSamplingParams, num_decisions: int) -> Tensor:
        """[n, S, H, D] of n S rows, of what the chunk has of them. Both sampling
        and replay take the deviations of the schedule, so that they have equal bits."""
        std_S = self._strategy.step_std(self._sigmas(params), params.stochastic_steps, eta=params.eta).to(y.device)
        length, size = self.chunk_shape
        densities = gaussian_log_density(y, mean, std_S.repeat(num_decisions))[:, :length, :size]
        return densities.unflatten(0, (num_decisions, -1))

    @staticmethod
    def _sigmas(params: ActionSamplingParams) -> Tensor:
        return torch.linspace(1, 0, params.num_inference_steps + 1)


class TokensPipeline(BasePipeline[BundleT]):
    """Chunks as tokens, a bin for each number, drawn side by side. A term is a token."""

    head: ClassVar[Head] = "bins"

    @abstractmethod
    def _logits(self, seen: Observations) -> tuple[Tensor, Tensor]:
        """Features [n, W], and logits [n, H, D, bins]."""

    @abstractmethod
    def _moves(self, tokens: Tensor) -> Tensor:
        """[n, H, D] float32 in [-1, 1] of bins."""

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        """A chunk for each observation."""
        logits = self._logits(seen)[1]
        if params.temperature == 0:
            tokens, densities = logits.argmax(dim=-1), None
        else:
            logp = (logits.float() / params.temperature).log_softmax(dim=-1)
            uniform = keyed_uniform(noise_keys, params.seed, self.chunk_shape).to(logp.device)
            below = logp.exp().cumsum(dim=-1) <= uniform[..., None]
            tokens = below.sum(dim=-1).clamp(max=logp.shape[-1] - 1)
            densities = logp.gather(-1, tokens[..., None])[:, None, :, :, 0]
        return DrawnChunks(moves=self._moves(tokens), tokens=tokens, densities=densities)

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        """[n, H D] of [n, 1, H, D], 0 for moves that were not executed."""
        is_executed = executed(num_moves, densities.shape[2])[:, :, None]
        return torch.where(is_executed, densities[:, 0], 0.0).flatten(1)

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> ChunkStats:
        """One forward of all n decisions."""
        if segment.tokens is None:
            raise ContractError("this segment holds chains; a head with bins replays tokens")
        if params.temperature == 0:
            raise ConfigError("the most probable bins cannot be replayed. Set sampling.temperature above 0.")
        decision_N = decision_N.to(segment.tokens.device)
        features, logits = self._logits(segment.observations().select(decision_N))
        logp = (logits.float() / params.temperature).log_softmax(dim=-1)
        tokens, num_moves = segment.tokens[decision_N], segment.num_moves[decision_N]
        entropy = -(logp.exp() * logp).sum(dim=-1)
        return ChunkStats(
            logp_NL=self.log_probs(logp.gather(-1, tokens[..., None])[:, None, :, :, 0], num_moves),
            entropy_NL=self.log_probs(entropy[:, None], num_moves),
            features_NW=features,
        )
