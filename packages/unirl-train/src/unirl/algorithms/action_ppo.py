"""PPO on the actions of episodes, with a critic over what the policy makes of an observation.

Legend: B episodes, T decisions of the longest, N decisions of all, n of them in a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.action_grpo import ActionGRPO, action_segment
from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.critic import TokenCritic
from unirl.algorithms.gae import packed_advantages, padded
from unirl.algorithms.values import explain_variance, report_values, value_loss
from unirl.types.actions import ActionSegment
from unirl.types.bounds import NonNegative, Positive, PositiveOrInf, UnitInterval, bounded
from unirl.types.devices import widened
from unirl.types.protocols.models import ActionPipeline, ActionStats
from unirl.types.protocols.training import ModuleStore
from unirl.types.segments import SegmentStatus
from unirl.types.training import OptimizerConfig


def decision_rewards(segment: ActionSegment, reward_B: Tensor) -> Tensor:
    """Rewards float64 [N]: what the environment gave for each chunk, and what the reward of the episode is more than
    their sum, such as other scorers' part, with its last decision."""
    rewards_N = widened(segment.rewards).clone()
    episode_N = segment.episode_N.to(rewards_N.device)
    given_B = rewards_N.new_zeros(segment.batch_size).index_add_(0, episode_N, rewards_N)
    last_B = (segment.cu_seqlens[1:] - 1).to(rewards_N.device)
    rewards_N[last_B] += widened(reward_B) - given_B
    return rewards_N


def episode_advantages(
    rewards_N: Tensor, values_N: Tensor, final_values_B: Tensor, lengths_B: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns of every decision, float64 [N] each, episodes end to end.

    final_values_B: V of what follows the last decision: 0 where the environment ended the episode, and of one that was
    cut off the value of the observation that it would have gone on from.
    gamma, lam: per decision, a chunk of moves.
    """
    rewards_BT = padded(widened(rewards_N), lengths_B)
    rows = torch.arange(len(lengths_B), device=rewards_BT.device)
    rewards_BT[rows, lengths_B.to(rows.device) - 1] += gamma * widened(final_values_B)
    return packed_advantages(rewards_BT, values_N, lengths_B, gamma=gamma, lam=lam)


@bounded("algorithm")
class ActionPPO(ActionGRPO):
    """ActionGRPO's surrogate on generalised advantages over the decisions of an episode, with a critic.

    What the stack passes as advantages is the reward of the episode here, so `advantages: {center: none, scale: none}`.
    An episode that its environment ended is worth nothing after its end; one that was cut off is worth what the critic
    says of its last observation.

    critic: V(what the policy makes of an observation), whose gradient stops there. critic_optimizer: its AdamW, under
        the backend's schedule. critic_max_grad_norm: its own clipping.
    gamma, lam: discount and trace decay per decision, a chunk of moves.
    value_coef: weight of the value loss. value_clip: half-width of the band around the old value outside of which a
        value gains nothing, in units of the reward; None leaves it out.
    Everything else: see `ActionGRPO`.
    """

    learns_value: ClassVar[bool] = True
    freezes_fields: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: ActionPipeline,
        policies: ModuleStore,
        *,
        critic: TokenCritic,
        critic_optimizer: OptimizerConfig,
        critic_max_grad_norm: PositiveOrInf = 1.0,
        gamma: UnitInterval = 0.97,
        lam: UnitInterval = 0.95,
        value_coef: NonNegative = 0.5,
        value_clip: Positive | None = 0.2,
        **options: Any,  # Any: the keywords of ActionGRPO
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self._modules = policies
        self.critic = critic
        self.critic_optimizer = critic_optimizer
        self.critic_max_grad_norm = critic_max_grad_norm
        self.gamma = gamma
        self.lam = lam
        self.value_coef = value_coef
        self.value_clip = value_clip
        self.uses_anchor = True

    def prepare(self) -> None:
        """Let the critic train together with the policy."""
        super().prepare()
        self._modules.add_module("critic", self.critic, self.critic_optimizer, max_grad_norm=self.critic_max_grad_norm)

    def trust_rollout(self) -> None:
        """The anchor continues to hold what the critic says."""
        super().trust_rollout()
        self.uses_anchor = True

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs, where they are replayed, and value, advantage and return [N] before the first update."""
        return {**(super().anchor(micro) if self.replays_old else {}), **self._valued(micro)}

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """The parts of the policy, each with the value loss of its decisions."""
        if "value" not in micro.anchor:  # the first update: the critic has not changed yet
            micro = replace(micro, anchor={**micro.anchor, **self._valued(micro)})
        yield from super().losses(micro)

    def decision_advantages(self, micro: MicroBatch) -> Tensor:
        """The generalised advantage of every decision [N]."""
        return micro.anchor["advantage"]

    def added_loss(
        self, micro: MicroBatch, decisions: Tensor, stats: ActionStats, metrics: RowMetrics
    ) -> Tensor | None:
        """The value loss [n]."""
        value_N = self.critic(stats.features_NW.detach())
        old_N, return_N = (micro.anchor[name][decisions] for name in ("value", "return"))
        loss_N = value_loss(value_N, old_N, return_N, clip=self.value_clip)
        report_values(metrics, value_N, return_N, loss_N)
        return self.value_coef * loss_N

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Say how much of the returns' variance the critic explains."""
        super().after_update(metrics, num_samples)
        explain_variance(metrics)

    def _valued(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Value, advantage and return [N] under the present policy and critic."""
        segment = action_segment(micro.track)
        seen = segment.observations()
        with torch.no_grad():
            values_N = torch.cat(
                [self.critic(self._pipeline.features(seen.select(each))) for each in self._forwards(segment)]
            )
            # Of all episodes: ranks that gather a sharded model run equally many forwards.
            beyond_B = self.critic(self._pipeline.features(segment.final_observations()))
            is_cut = torch.zeros_like(beyond_B, dtype=torch.bool)
            if segment.status is not None:
                is_cut = segment.status == SegmentStatus.TRUNCATED
            final_B = torch.where(is_cut, beyond_B, 0.0)
        advantages_N, returns_N = episode_advantages(
            decision_rewards(segment, micro.advantages),
            values_N,
            final_B,
            segment.lengths,
            gamma=self.gamma,
            lam=self.lam,
        )
        return {"value": values_N, "advantage": advantages_N.float(), "return": returns_N.float()}
