"""Advantages of each medium of a sample, such as a video and its sound, from the reward components routed to it.

Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.advantages import AdvantageConfig, MultiReward
from unirl.algorithms.routed_advantages_rules import Span, problems_of_routes
from unirl.algorithms.schedules import LinearWeight
from unirl.types.bounds import bounded
from unirl.types.errors import ConfigError

Route = Mapping[str, float | LinearWeight]


@bounded("advantages")
@dataclass(frozen=True)
class RoutedAdvantages(AdvantageConfig):
    """Advantages by medium: sum over the components k routed to it of w_k z_k, z_k normalised as the preset says.

    The default preset is OmniNFT's (arXiv 2605.12480): each component is centred on its prompt's group and divided by
    its standard deviation over the batch. `routes` names, for each medium of the latent, its reward components with
    their weights; one that judges how media fit together is named in several routes. With `multi_reward: gdpo` the sum
    of each route is normalised over the batch once more.
    Selection, experience replay, reports and records of samples see one number per sample, the mean over the media.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.routed_advantages_rules"
    routes_media: ClassVar[bool] = True

    preset: str = "flow_grpo_global_std"
    multi_reward: MultiReward = "normalize_then_sum"
    routes: Mapping[str, Route] | None = None
    """Medium -> component of the reward -> weight of at least 0, fixed or changing over the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multi_reward == "weighted_sum" or self.component_weights is not None:
            raise ConfigError(
                f"RoutedAdvantages normalises each component by itself and weighs it by its route, but "
                f"advantages.multi_reward = {self.multi_reward} and component_weights = {self.component_weights}. Set "
                "advantages.multi_reward: normalize_then_sum or gdpo, and write the weights in advantages.routes."
            )
        spans = {medium: {k: _span(w) for k, w in route.items()} for medium, route in (self.routes or {}).items()}
        for problem in problems_of_routes("advantages", spans):
            raise ConfigError(problem)

    @property
    def _by_medium(self) -> dict[str, AdvantageConfig]:
        """What normalises and weighs the components of each medium."""
        shared: dict[str, Any] = {own.name: getattr(self, own.name) for own in fields(AdvantageConfig)}  # Any: of each
        plain = AdvantageConfig(**shared)
        return {name: replace(plain, component_weights=route) for name, route in (self.routes or {}).items()}

    def by_medium(
        self, group_ids: Sequence[str], component_rewards: Mapping[str, Tensor], *, progress: float = 0.0
    ) -> dict[str, Tensor]:
        """Advantages float32 [B] of each medium, of one whole batch, at `progress` in [0, 1] of the run.

        Raises ConfigError for a route to a component that the reward does not have.
        """
        found = {}
        for medium, own in self._by_medium.items():
            names = own.component_weights or {}
            absent = sorted(set(names) - set(component_rewards))
            if absent:
                raise ConfigError(
                    f"advantages.routes.{medium} names {absent}; components of the reward are "
                    f"{sorted(component_rewards)}"
                )
            rewards = {name: component_rewards[name] for name in names}
            found[medium] = own(next(iter(rewards.values())), group_ids, rewards, progress=progress)
        return found

    def metrics(self, progress: float) -> dict[str, float]:
        """The weights that a schedule changes, as they are at `progress`."""
        return {
            name.replace("advantage/weight/", f"advantage/weight/{medium}/"): value
            for medium, own in self._by_medium.items()
            for name, value in own.metrics(progress).items()
        }

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """The mean over the media, float32 [B]; the weighted reward and numbers of tokens have no influence."""
        return mean_over_media(self.by_medium(group_ids, component_rewards or {}, progress=progress))


def mean_over_media(routed: Mapping[str, Tensor]) -> Tensor:
    """One number per sample, float32 [B]."""
    return torch.stack(list(routed.values())).mean(dim=0)


def _span(weight: float | LinearWeight) -> Span:
    return (weight.start, weight.end) if isinstance(weight, LinearWeight) else (weight, weight)
