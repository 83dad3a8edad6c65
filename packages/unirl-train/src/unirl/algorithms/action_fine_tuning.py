"""Cloning of demonstrations by policies that act: flow matching of their chunks, or cross entropy of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from unirl.algorithms.action_grpo import action_segment
from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, StageAlgorithm, row_chunks
from unirl.algorithms.sample_weights import require_weights
from unirl.types.bounds import PositiveInt, Seed, bounded
from unirl.types.protocols.models import ImitatingPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack


@bounded("algorithm")
class ActionFineTuning(StageAlgorithm):
    """w L for every decision of an episode of weight w >= 0; the mean over decisions. L is what the pipeline makes of
    the chunk that was executed (`imitation_loss`).

    policies: of no use here. decisions_per_forward: memory knob.
    seed: of the noise, which follows from the rollout, the sample and the decision.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.action_rules"
    trains_actions: ClassVar[bool] = True
    takes_stale_samples: ClassVar[bool] = True
    requires_weights: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: ImitatingPipeline,
        policies: PolicyStore | None,
        *,
        decisions_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
    ) -> None:
        self._pipeline = pipeline
        self.decisions_per_forward = decisions_per_forward
        self.seed = seed
        self.num_rollouts = 0
        """Rollouts that were trained on; each draws other noise."""

    def num_terms(self, track: RolloutTrack) -> int:
        """Decisions."""
        return action_segment(track).num_decisions

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part per forward. Raises ConfigError for weights below 0."""
        require_weights(micro.advantages, type(self).__name__)
        segment = action_segment(micro.track)
        episode_N = segment.episode_N
        first_B = segment.cu_seqlens[:-1].tolist()
        keys = [
            f"r{self.num_rollouts}:u{micro.update}:{micro.track.sample_ids[episode]}::{place - first_B[episode]}"
            for place, episode in enumerate(episode_N.tolist())
        ]
        weight_N = micro.advantages[episode_N.to(micro.advantages.device)]
        every = torch.arange(segment.num_decisions, device=segment.rewards.device)
        for rows in row_chunks(segment.num_decisions, self.decisions_per_forward):
            loss_N = self._pipeline.imitation_loss(segment, every[rows], noise_keys=keys[rows], seed=self.seed)
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_N.detach())
            loss_N = weight_N[rows].to(loss_N.device) * loss_N
            yield LossPart(loss_N.sum(), loss_N.numel(), metrics)

    def after_rollout(self) -> dict[str, float]:
        """Count it."""
        self.num_rollouts += 1
        return {}

    def state_dict(self) -> dict[str, float]:
        """The count of rollouts."""
        return {"num_rollouts": self.num_rollouts}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue the count."""
        self.num_rollouts = int(state["num_rollouts"])
