"""The return that an environment gave."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.types.bounds import PositiveInt
from unirl.types.episodes import EPISODE
from unirl.types.errors import ContractError
from unirl.types.reward import RewardRequest


class EpisodeReturnScorer(LocalScorer):
    """The sum of the rewards of an episode's steps, as its environment gave them (`turns.environment`, of a policy that
    acts `engine.environment`).

    key: another number of the episode, such as "calls" or "turns".
    """

    reads_media = False
    card = ScorerCard(
        name="episode_return",
        summary="what the environment of an episode gave",
        media=("text", "video"),
        needs="turns.environment or engine.environment",
        typical="as the environment gives",
        source="yours",
    )

    def __init__(self, *, key: str = "reward", name: str = "episode_return", batch_size: PositiveInt = 64) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self._key = key

    def score_batch(self, request: RewardRequest) -> Tensor:
        """float32 [b]. Raises ContractError if a sample has no episode, or it has no such number."""
        return torch.tensor([self._number(row) for row in request.metadata or [None] * len(request.sample_ids)])

    def _number(self, row: object) -> float:
        episode = row.get(EPISODE) if isinstance(row, dict) else None
        if not isinstance(episode, dict) or not isinstance(episode.get(self._key), (int, float)):
            found = sorted(episode) if isinstance(episode, dict) else "no episode"
            raise ContractError(
                f"scorer {self.name} reads {self._key!r} of an episode, and a sample has {found}. Give the recipe "
                "turns.environment or engine.environment, or name a number that its environment counts."
            )
        return float(episode[self._key])
