"""Weights at least 0 instead of advantages: what supervised methods make of their own samples' rewards.

Reward-weighted regression, best-of-N fine-tuning and rejection fine-tuning differ in these weights alone; what is
weighted is the likelihood of tokens (`unirl.algorithms.ar_fine_tuning`) or the matching error of latents
(`unirl.algorithms.weighted_matching`).
Legend: B samples, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.advantages import finite_rewards, group_index
from unirl.types.bounds import Bounds, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError

WeightKind = Literal["reward_weighted", "best_of_n", "accepted", "equal"]


def reward_weights(rewards_B: Tensor, group_ids: Sequence[str], *, temperature: float) -> Tensor:
    """G softmax_group(reward / temperature), float32 [B], mean 1 in every group: reward-weighted regression.

    The policy of the highest reward with a KL to the sampling policy is p exp(reward / temperature) / Z, Z a constant
    of the prompt; the group's samples estimate Z. temperature -> inf weighs all alike, -> 0 keeps the best.
    Raises ContractError for rewards that are not finite. Sources: Peters & Schaal 2007; Peng et al. 2019 (arXiv
    1910.00177).
    """
    rewards = finite_rewards(rewards_B, len(group_ids))
    weights = torch.empty_like(rewards)
    index = group_index(group_ids)
    for number in range(int(index.max()) + 1):
        own = index == number
        weights[own] = torch.softmax(rewards[own] / temperature, dim=0) * int(own.sum())
    return weights.to(torch.float32)


def best_of_n_weights(rewards_B: Tensor, group_ids: Sequence[str], *, num_best: int) -> Tensor:
    """1 for the `num_best` samples of each group with the highest rewards, else 0, float32 [B]; ties go to the earlier.

    Raises ContractError for rewards that are not finite. Source: Dong et al. 2023 (arXiv 2304.06767), RAFT.
    """
    rewards = finite_rewards(rewards_B, len(group_ids))
    weights = torch.zeros(len(group_ids), dtype=torch.float32)
    index = group_index(group_ids)
    for number in range(int(index.max()) + 1):
        [own] = torch.nonzero(index == number, as_tuple=True)
        weights[own[rewards[own].sort(descending=True, stable=True).indices[:num_best]]] = 1.0
    return weights


def accepted_weights(rewards_B: Tensor, group_ids: Sequence[str], *, threshold: float) -> Tensor:
    """1 for samples with a reward above `threshold`, else 0, float32 [B].

    Raises ContractError for rewards that are not finite. Sources: Zelikman et al. 2022 (arXiv 2203.14465), STaR; Yuan
    et al. 2023 (arXiv 2308.01825), rejection sampling fine-tuning.
    """
    return (finite_rewards(rewards_B, len(group_ids)) > threshold).to(torch.float32)


@bounded("advantages")
class SampleWeights:
    """How a recipe turns rewards into weights of samples. Exactly the number of its kind must be given.

    kind: reward_weighted (RWR; `temperature`, in units of the reward), best_of_n (RAFT; `num_best` of each group) or
        accepted (rejection fine-tuning; rewards above `threshold`), or equal (no number; 1 for all, whatever the
        reward: supervised fine-tuning on given samples).
    With selection.drop_zero_variance samples of weight 0 are not trained on at all, and count in no mean.
    Raises ConfigError if the number of another kind is given, or none.
    """

    needs_groups: ClassVar[bool] = False
    makes_weights: ClassVar[bool] = True
    centres_groups: ClassVar[bool] = False

    def __init__(
        self,
        *,
        kind: WeightKind,
        temperature: Positive | None = None,
        num_best: PositiveInt | None = None,
        threshold: Annotated[float, Bounds()] | None = None,
    ) -> None:
        needed = {"reward_weighted": "temperature", "best_of_n": "num_best", "accepted": "threshold"}.get(kind)
        given = {"temperature": temperature, "num_best": num_best, "threshold": threshold}
        if [name for name, value in given.items() if value is not None] != ([] if needed is None else [needed]):
            takes = "no number" if needed is None else f"advantages.{needed} and no other number"
            raise ConfigError(f"advantages.kind = {kind} takes {takes}, got {given}")
        self.kind: WeightKind = kind
        self._number: Any = None if needed is None else given[needed]  # Any: whole for num_best
        self._effective_fraction = 0.0

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """Weights float32 [B], at least 0, of one whole batch; the other arguments have no influence."""
        if self.kind == "reward_weighted":
            weights = reward_weights(rewards_B, group_ids, temperature=self._number)
        elif self.kind == "best_of_n":
            weights = best_of_n_weights(rewards_B, group_ids, num_best=self._number)
        elif self.kind == "equal":
            weights = torch.ones(len(group_ids), dtype=torch.float32)
        else:
            weights = accepted_weights(rewards_B, group_ids, threshold=self._number)
        total = float(weights.sum())
        self._effective_fraction = total**2 / float(weights.square().sum()) / len(group_ids) if total > 0 else 0.0
        return weights

    @property
    def counts_tokens(self) -> bool:
        """False: samples count alike."""
        return False

    def metrics(self, progress: float) -> dict[str, float]:
        """Share of the last rollout's samples that count: (sum w)^2 / (B sum w^2)."""
        return {"advantage/effective_fraction": self._effective_fraction}

    def state_dict(self) -> dict[str, Any]:
        """Empty: every rollout is weighted by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def require_weights(weight_B: Tensor, algorithm: str) -> None:
    """Raises ConfigError if a weight is below 0: a likelihood that falls without bound teaches nothing."""
    if bool((weight_B < 0).any()):
        raise ConfigError(
            f"{algorithm} weighs its samples, and a weight of {float(weight_B.min()):.3g} is below 0. Set "
            "advantages._target_: unirl.algorithms.sample_weights.SampleWeights."
        )
