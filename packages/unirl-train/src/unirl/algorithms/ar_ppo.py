"""PPO on tokens with a value head and generalised advantages: every token is trained on what it added.

Sources: Schulman et al. 2017 (arXiv 1707.06347) and 2016 (arXiv 1506.02438); as in Ziegler et al. 2019 (arXiv
1909.08593), where the penalty towards the reference is part of the reward.
Legend: B samples, M trained tokens of all of them, T tokens of the longest, D width of the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import MicroBatch, RowMetrics
from unirl.algorithms.critic import TokenCritic
from unirl.algorithms.gae import at_last, packed_advantages, padded
from unirl.algorithms.reference import METRIC as REFERENCE_KL
from unirl.algorithms.token_losses import sequence_sum
from unirl.algorithms.tokens import TrainedTokens
from unirl.algorithms.values import explain_variance, report_values, value_loss
from unirl.types.bounds import NonNegative, Positive, PositiveOrInf, UnitInterval, bounded
from unirl.types.devices import widened
from unirl.types.protocols.models import AutoregressivePipeline, TokenStats
from unirl.types.protocols.training import ModuleStore
from unirl.types.training import OptimizerConfig


@bounded("algorithm")
class ARPPO(ARGRPO):
    """ARGRPO's surrogate on generalised advantages, with a critic that learns the returns.

    What the stack passes as advantages is the reward here, given at the last trained token: centred on nothing or on
    the batch (`advantages: {center: batch, scale: batch}`), never on its group, whose mean is the critic's to learn.
    `advantage_clip` bounds the generalised advantage.

    critic: V(text so far), trained in place on the model's hidden states. critic_optimizer: its AdamW, under the
        backend's schedule. critic_max_grad_norm: its own clipping.
    gamma, lam: discount and trace decay a token. lam = 1 trusts the reward alone, lam = 0 the critic alone.
    value_coef: weight of the value loss. value_clip: half-width of the band around the old value outside of which a
        value gains nothing, in units of the reward; None leaves it out.
    value_trains_policy: whether the value loss also moves the language model that the critic reads.
    kl_in_reward: the penalty is a reward of -kl_coef * k1 at every token instead of a part of the loss.
    Everything else: see `ARGRPO`.
    """

    learns_value: ClassVar[bool] = True
    freezes_fields: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: ModuleStore,
        *,
        critic: TokenCritic,
        critic_optimizer: OptimizerConfig,
        critic_max_grad_norm: PositiveOrInf = 1.0,
        gamma: UnitInterval = 1.0,
        lam: UnitInterval = 0.95,
        value_coef: NonNegative = 0.5,
        value_clip: Positive | None = 0.2,
        value_trains_policy: bool = False,
        kl_in_reward: bool = False,
        **options: Any,  # Any: the keywords of ARGRPO
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
        self.value_trains_policy = value_trains_policy
        self.penalises_reward = kl_in_reward
        self.uses_anchor = True

    def prepare(self) -> None:
        """Let the critic train together with the policy."""
        super().prepare()
        self._modules.add_module("critic", self.critic, self.critic_optimizer, max_grad_norm=self.critic_max_grad_norm)

    def trust_rollout(self) -> None:
        """The critic needs a replay before the first update anyway, so its log-probs are taken too."""

    def anchor_fields(
        self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, reference_logp_M: Tensor | None
    ) -> dict[str, Tensor]:
        """Value, advantage and return [M] under the critic before the first update."""
        value_M = self.critic(trained.of(stats.hidden_N))
        fields = {"value": value_M}
        rewards_M = self.token_rewards(micro, trained)
        if reference_logp_M is not None:
            k1_N = fields["k1"] = trained.of(stats.logp_N) - reference_logp_M
            rewards_M = rewards_M - widened(self.reference.coef * k1_N)
            fields["penalty"] = -self.reference.coef * sequence_sum(k1_N, trained.lengths_B)
        advantages_M, returns_M = self.generalized(rewards_M, value_M, micro, trained)
        return {**fields, "advantage": advantages_M.float(), "return": returns_M.float()}

    def token_rewards(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """Reward of every trained token, float64 [M]: that of the sample at its last."""
        return at_last(widened(micro.advantages), trained.lengths_B)

    def generalized(
        self, rewards_M: Tensor, value_M: Tensor, micro: MicroBatch, trained: TrainedTokens
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of every trained token, float64 [M] each."""
        rewards_BT = padded(rewards_M, trained.lengths_B)
        return packed_advantages(rewards_BT, value_M, trained.lengths_B, gamma=self.gamma, lam=self.lam)

    def token_advantages(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """The generalised advantage of every token [M]."""
        return micro.anchor["advantage"]

    def added_loss(self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, metrics: RowMetrics) -> Tensor:
        """The value loss [M]."""
        if "k1" in micro.anchor:
            metrics.mean(REFERENCE_KL, micro.anchor["k1"])
            metrics.mean("ppo/penalty_in_reward", micro.anchor["penalty"])
        hidden_MD = trained.of(stats.hidden_N)
        value_M = self.critic(hidden_MD if self.value_trains_policy else hidden_MD.detach())
        loss_M = value_loss(value_M, micro.anchor["value"], micro.anchor["return"], clip=self.value_clip)
        report_values(metrics, value_M, micro.anchor["return"], loss_M)
        return self.value_coef * loss_M

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Say how much of the returns' variance the critic explains."""
        super().after_update(metrics, num_samples)
        explain_variance(metrics)
