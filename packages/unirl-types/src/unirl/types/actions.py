"""What a track of episodes holds: every decision of a policy that acts, episodes end to end.

An episode is one sample. At each decision the policy sees an observation and draws a chunk of moves, of which the
environment executes some before the next decision or the end.
Legend: B episodes, N decisions of all episodes, H moves of a chunk, D numbers of a move, K flow steps, S stochastic
ones, L terms of a decision: its S stochastic steps, its whole chain, or its H D tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.batch import packed, per_sample, shared
from unirl.types.errors import ContractError
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import Segment


@dataclass(frozen=True, eq=False)
class Observations:
    """What a policy sees at n decisions: images, states or both."""

    images: Tensor | None = None
    """[n, C, H, W] uint8."""
    states: Tensor | None = None
    """[n, S] float32."""
    prompts: Tensor | None = None
    """[n, P] int64, the tokens of what it is told to do, -1 after their end; None of a policy that reads none."""

    def __post_init__(self) -> None:
        if self.images is None and self.states is None:
            raise ContractError("an observation has images, states or both; this one has neither")

    def __len__(self) -> int:
        seen = self.states if self.images is None else self.images
        assert seen is not None  # noqa: S101 - one of the two is there
        return len(seen)

    def select(self, rows: Tensor) -> Observations:
        """The observations at `rows` [m] int64."""
        parts = (self.images, self.states, self.prompts)
        return Observations(*(None if each is None else each[rows] for each in parts))

    def to(self, device: torch.device | str) -> Observations:
        """The same on `device`."""
        parts = (self.images, self.states, self.prompts)
        return Observations(*(None if each is None else each.to(device) for each in parts))


@dataclass(frozen=True, eq=False)
class DrawnChunks:
    """Chunks of moves for n observations."""

    moves: Tensor
    """[n, H, D] float32 in [-1, 1]."""
    chains: Tensor | None = None
    """[n, K+1, H, D] float32, of a flow."""
    tokens: Tensor | None = None
    """[n, H, D] int64, of bins."""
    densities: Tensor | None = None
    """Log-probs of single numbers, float32: [n, S, H, D] of a flow, with the noise that it began from first where the
    chain has one term, [n, 1, H, D] of bins. None where nothing was drawn from a distribution."""


@dataclass(kw_only=True, eq=False)
class ActionSegment(Segment):
    """The decisions of each episode in order. Build with `ActionSegment.pack(images=[[n, C, H, W], ...], ...)`.

    `status` says how an episode ended: COMPLETED by the environment, TRUNCATED at its limit of moves, FAILED where the
    environment was lost; None means that all completed. A chunk is a chain of latents (flow) or tokens (bins).
    """

    images: Tensor | None = packed(default=None)
    """[N, C, H, W] uint8, what the policy saw."""
    states: Tensor | None = packed(default=None)
    """[N, S] float32, likewise. An observation has one of the two, or both."""
    chains: Tensor | None = packed(default=None)
    """[N, K+1, H, D] float32, the chunk from noise to moves."""
    tokens: Tensor | None = packed(default=None)
    """[N, H, D] int64, the bin of each number."""
    log_probs: Tensor | None = packed(default=None)
    """[N, L] float32, nats, over the executed moves alone; of a token that was not executed 0. None: nothing was drawn
    from a distribution (the most probable actions)."""
    rewards: Tensor = packed()
    """[N] float32, what the environment gave for the executed moves of each chunk."""
    num_moves: Tensor = packed()
    """[N] int64 in 1..H, executed moves of each chunk."""
    final_images: Tensor | None = per_sample(default=None)
    """[B, C, H, W] uint8, the observation after the last move: what a truncated episode would have gone on from."""
    final_states: Tensor | None = per_sample(default=None)
    """[B, S] float32, likewise."""
    prompts: Tensor | None = per_sample(default=None)
    """[B, P] int64, see `Observations`."""
    sigmas: Tensor | None = shared(default=None)
    """[K+1] float32, decreasing from 1 to 0; of chains."""
    sde_indices: list[int] = shared(default_factory=list)
    """[S] which of the K steps were stochastic."""
    is_joint: bool = shared(default=False)
    """True if a decision has one term, the log-prob of its whole chain; of chains."""
    params: ActionSamplingParams | None = shared(default=None)
    """What the chunks were sampled with; replay uses these and no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.chains is None) == (self.tokens is None):
            raise ContractError("ActionSegment holds chunks as chains or as tokens, one of the two")
        if self.images is None and self.states is None:
            raise ContractError("ActionSegment needs what the policy saw: images, states or both")
        for name, dtype, ndim in (
            ("images", torch.uint8, 4),
            ("states", torch.float32, 2),
            ("chains", torch.float32, 4),
            ("tokens", torch.long, 3),
            ("log_probs", torch.float32, 2),
            ("prompts", torch.long, 2),
            ("rewards", torch.float32, 1),
            ("num_moves", torch.long, 1),
        ):
            value = getattr(self, name)
            if value is not None and (value.dtype != dtype or value.ndim != ndim):
                raise ContractError(
                    f"ActionSegment.{name} must be {dtype} of {ndim} dimensions, got {value.dtype} {tuple(value.shape)}"
                )
        if self.chains is not None:
            self._check_chains(self.chains)
        if self.log_probs is not None and self.log_probs.shape[1] != self.num_terms:
            raise ContractError(
                f"ActionSegment.log_probs {tuple(self.log_probs.shape)} must have {self.num_terms} terms per decision"
            )

    def _check_chains(self, chains: Tensor) -> None:
        num_positions = None if self.sigmas is None else self.sigmas.numel()
        if num_positions != chains.shape[1]:
            raise ContractError(
                f"ActionSegment.chains {tuple(chains.shape)} must be [N, K+1, H, D] with the K+1 of sigmas, which has "
                f"{num_positions}"
            )
        if any(not 0 <= step < chains.shape[1] - 1 for step in self.sde_indices):
            raise ContractError(f"stochastic steps {self.sde_indices} must lie in 0..{chains.shape[1] - 2}")

    @property
    def num_decisions(self) -> int:
        """N."""
        return self.rewards.shape[0]

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """H and D."""
        chunks = self.chains if self.tokens is None else self.tokens
        assert chunks is not None  # noqa: S101 - one of the two is there
        return chunks.shape[-2], chunks.shape[-1]

    @property
    def num_terms(self) -> int:
        """L, terms of the loss per decision."""
        height, width = self.chunk_shape
        if self.tokens is not None:
            return height * width
        return 1 if self.is_joint else len(self.sde_indices)

    @property
    def move_mask(self) -> Tensor:
        """[N, H] bool, the moves that were executed."""
        return torch.arange(self.chunk_shape[0], device=self.num_moves.device) < self.num_moves[:, None]

    @property
    def term_mask(self) -> Tensor:
        """[N, L] bool, the terms that count: tokens of executed moves, and every stochastic step or chain."""
        if self.tokens is None:
            return self.num_moves.new_ones(self.num_decisions, self.num_terms, dtype=torch.bool)
        return self.move_mask.repeat_interleave(self.chunk_shape[1], dim=1)

    def observations(self) -> Observations:
        """What the policy saw at all N decisions."""
        prompts = None
        if self.prompts is not None:
            prompts = self.prompts[self.episode_N.to(self.prompts.device)]
        return Observations(self.images, self.states, prompts)

    def final_observations(self) -> Observations:
        """What it would have seen next, of each episode. Raises ContractError if the engine did not keep it."""
        if self.final_images is None and self.final_states is None:
            raise ContractError("this segment does not hold the observations after the last moves")
        return Observations(self.final_images, self.final_states, self.prompts)

    @property
    def episode_N(self) -> Tensor:
        """[N] int64 on the CPU, the episode of each decision."""
        return torch.arange(self.batch_size).repeat_interleave(self.lengths)
