"""PPO on episodes of several turns: what the environment gave for each turn, and advantages over and within turns.

Legend: B samples, N tokens of their segments, M of them trained, K turns of all samples.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.gae import Turns, at_last, turn_advantages
from unirl.algorithms.token_losses import sequence_index, sequence_sum
from unirl.algorithms.tokens import TrainedTokens, text_segment
from unirl.types.bounds import UnitInterval, bounded
from unirl.types.devices import widened
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import ModuleStore


@bounded("algorithm")
class TurnPPO(ARPPO):
    """ARPPO with the rewards of turns, at the last token of each. What the reward of the episode is more than their
    sum, such as other scorers' part, is given at its last token.

    What the stack passes as advantages is the reward of the episode here, so `advantages: {center: none, scale: none}`.
    gamma, lam: discount and trace decay per token within a turn. What the model reads has no part.
    turn_gamma, turn_lam: per turn, from the last token of one to that of the next, see `gae.turn_advantages`. Without
        both, a turn ends like any token: one recursion over all tokens that the model wrote.
    Everything else: see `ARPPO`. Raises ConfigError for one of the two alone, and with kl_in_reward: a penalty of a
    token would reach no turn before its own.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.turn_rules"

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: ModuleStore,
        *,
        turn_gamma: UnitInterval | None = None,
        turn_lam: UnitInterval | None = None,
        **options: Any,  # Any: the keywords of ARPPO
    ) -> None:
        super().__init__(pipeline, policies, **options)
        if (turn_gamma is None) != (turn_lam is None):
            raise ConfigError(
                f"algorithm.turn_gamma = {turn_gamma} and algorithm.turn_lam = {turn_lam}: give both, or neither."
            )
        if turn_gamma is not None and self.penalises_reward:
            raise ConfigError(
                "algorithm.kl_in_reward with algorithm.turn_gamma: the penalty of a token would reach no turn before "
                "its own. Set kl_in_reward: false, or turn_gamma and turn_lam to null."
            )
        self.turn_gamma, self.turn_lam = turn_gamma, turn_lam

    def token_rewards(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """Reward of every trained token, float64 [M]. Raises ContractError of a track without rewards of turns."""
        segment = text_segment(micro.track)
        if segment.rewards is None:
            raise ContractError("TurnPPO needs rewards of turns, and the track has none: no environment answered.")
        rewards_M = widened(trained.of(segment.rewards))
        rest_B = widened(micro.advantages) - sequence_sum(rewards_M, trained.lengths_B)
        return rewards_M + at_last(rest_B, trained.lengths_B)

    def generalized(
        self, rewards_M: Tensor, value_M: Tensor, micro: MicroBatch, trained: TrainedTokens
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of every trained token, float64 [M] each."""
        if self.turn_gamma is None or self.turn_lam is None:
            return super().generalized(rewards_M, value_M, micro, trained)
        turns = Turns.of_runs(trained.chosen_N, text_segment(micro.track).lengths)
        rewards_K = rewards_M.new_zeros(len(turns.tokens_K))
        rewards_K.index_add_(0, sequence_index(turns.tokens_K).to(rewards_M.device), rewards_M)
        return turn_advantages(
            rewards_K,
            value_M,
            turns,
            gamma=self.gamma,
            lam=self.lam,
            turn_gamma=self.turn_gamma,
            turn_lam=self.turn_lam,
        )
