"""What a scorer offers. B samples."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from unirl.types.reward import RewardRequest, RewardResponse


@runtime_checkable
class Scorer(Protocol):
    """Scores a batch of samples."""

    name: str

    def score(self, request: RewardRequest) -> RewardResponse:
        """One finite reward per sample, or NaN with success False and an error text."""
        ...


@runtime_checkable
class ConcurrentScorer(Scorer, Protocol):
    """A scorer that several threads may ask at once: one that waits for others to compute."""

    max_concurrency: int
    """Requests that are worth having under way at one time."""


@runtime_checkable
class GroupwiseScorer(Scorer, Protocol):
    """A scorer that knows whether it compares samples."""

    is_groupwise: bool
    """True if a sample's score depends on the others of its group, so that it is asked about whole groups."""


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward with gradients, in the process that trains."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B] with gradients to the pixels of the request's images."""
        ...
