"""Rewards of a reward server, as a scorer of `RewardService`.

Legend: B samples.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from torch import Tensor

from unirl.reward.client import RewardClient, Transport
from unirl.reward.compose import Aggregation, checked_weights, composed
from unirl.reward.wire import Pixels
from unirl.types.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest, RewardResponse


@bounded("scorer")
class RemoteRewardBackend:
    """Asks reward servers for one or several of their rewards, each sample's media sent once.

    required_rewards: names in the servers' roster. reward_weights, aggregation: how several become one reward, as in
    `RewardService`; component_rewards has each as `name/<reward>`, its components as `name/<reward>/<component>`. One
    alone is reported as it is: `name/<component>`.
    name: how results and messages call it; None is the reward's own name, or "remote" for several.
    groupwise: one of the rewards compares the samples of a prompt, so that servers get whole groups.
    start_timeout_s: how long servers may still be loading when this is made.
    Everything else: see `unirl.reward.client.RewardClient`.

    Raises ConfigError when it is made, if a server cannot be reached, refuses the token or lacks a reward, or if a
    reward compares groups and `groupwise` does not say so.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        required_rewards: Sequence[str],
        reward_weights: Mapping[str, float] | None = None,
        aggregation: Aggregation = "weighted_sum",
        *,
        name: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        transport: Transport = "binary",
        pixels: Pixels = "lossless",
        batch_size: PositiveInt = 32,
        max_concurrency: PositiveInt = 8,
        timeout_s: Positive = 300.0,
        max_retries: NonNegativeInt = 4,
        retry_delay_s: NonNegative = 1.0,
        deadline_s: Positive = 1800.0,
        start_timeout_s: NonNegative = 10.0,
        trust_env: bool = False,
        groupwise: bool = False,
    ) -> None:
        self.required_rewards = [required_rewards] if isinstance(required_rewards, str) else list(required_rewards)
        if not self.required_rewards or len(set(self.required_rewards)) != len(self.required_rewards):
            raise ConfigError(f"required_rewards = {required_rewards!r} must name one or several rewards, each once")
        self.reward_weights = checked_weights(self.required_rewards, reward_weights, aggregation)
        self.aggregation: Aggregation = aggregation
        self.name = name or (self.required_rewards[0] if len(self.required_rewards) == 1 else "remote")
        self.max_concurrency = max_concurrency
        self.is_groupwise = groupwise
        self._client = RewardClient(
            base_url,
            token=token,
            token_file=token_file,
            transport=transport,
            pixels=pixels,
            batch_size=batch_size,
            max_concurrency=max_concurrency,
            timeout_s=timeout_s,
            max_retries=max_retries,
            retry_delay_s=retry_delay_s,
            deadline_s=deadline_s,
            trust_env=trust_env,
        )
        try:
            self._client.wait_until_ready(start_timeout_s)
            for url, roster in self._client.rewards().items():
                self._check_roster(url, roster)
            if not groupwise and (compared := self._client.groupwise_rewards() & set(self.required_rewards)):
                raise ConfigError(
                    f"scorer {self.name}: {', '.join(sorted(compared))} of {self._client.urls[0]} compares the "
                    "samples of a prompt, which must come together. Set groupwise: true."
                )
        except BaseException:
            self.close()
            raise

    def score(self, request: RewardRequest) -> RewardResponse:
        """Rewards float32 [B]; a sample without one has its reason. Raises what `RewardClient.score` raises."""
        answers = self._client.score(request, self.required_rewards, is_groupwise=self.is_groupwise)
        total_B = composed(
            {name: each.rewards for name, each in answers.items()}, self.reward_weights, self.aggregation
        )
        if len(answers) == 1:
            (answer,) = answers.values()
            return answer.replace(rewards=total_B, component_rewards=_renamed(answer.component_rewards, self.name))
        errors: list[str | None] = [None] * len(request.sample_ids)
        components: dict[str, Tensor] = {}
        for reward, answer in answers.items():
            components[f"{self.name}/{reward}"] = answer.rewards
            for key, value in answer.component_rewards.items():
                if "/" in key:
                    components[f"{self.name}/{key}"] = value
            errors = [
                known if known is not None or own is None else f"reward {reward}: {own}"
                for known, own in zip(errors, answer.errors, strict=True)
            ]
        return RewardResponse(
            sample_ids=list(request.sample_ids),
            rewards=total_B,
            component_rewards=components,
            successes=[error is None for error in errors],
            errors=errors,
        )

    def close(self) -> None:
        """Break off what is under way and close the connections. Safe to call twice."""
        self._client.close()

    def _check_roster(self, url: str, roster: list[str]) -> None:
        missing = [name for name in self.required_rewards if name not in roster]
        if missing:
            near = difflib.get_close_matches(missing[0], roster, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{url} has no reward {missing[0]!r}; it has {sorted(roster)}. {hint}"
                "Correct required_rewards, or add it to the server's file."
            )


def _renamed(components: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The components of one reward under the name that the recipe gives it."""
    parts = {key.partition("/")[2]: value for key, value in components.items()}
    return {f"{name}/{part}" if part else name: value for part, value in parts.items()}
