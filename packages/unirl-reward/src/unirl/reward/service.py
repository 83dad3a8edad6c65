"""Scores rollouts: several scorers, one reward, and a policy for samples that cannot be scored.

Legend: B samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unirl.reward.base import SAMPLE_ERRORS, Isolation, LocalScorer, describe_failures
from unirl.reward.compose import Aggregation, checked_weights, composed, failed_groups
from unirl.reward.shaping import LengthShaping, TruncatedReward
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.protocols import Scorer
from unirl.types.reward import RewardRequest, RewardResponse, media_slot
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

FailurePolicy = Literal["raise", "retry", "drop_group"]

_ISOLATION: dict[FailurePolicy, Isolation] = {"raise": "none", "retry": "batch", "drop_group": "sample"}


class RewardService:
    """Scores requests with every scorer and joins the results.

    scorers: name -> scorer, or a list of scorers under their own names.
    weights: scorer -> weight; None means 1 each. The reward is the plain weighted sum of the scorers' raw rewards
    (`weighted_mean`: divided by the sum of the weights), so scales are the caller's affair.
    on_failure: what happens when a sample has no finite reward. `raise`: RewardError at once. `retry`: only the
    failed samples again, up to max_retries times, then RewardError. `drop_group`: every sample of its group gets
    success False and reward NaN, counted, for the trainer to leave out and refill.
    device: moves every local scorer with modules there; None leaves each where its own `device` says.
    truncated_reward, overlong_buffer_len, overlong_penalty_factor: what the length of generated texts does to the
    rewards that `score_and_attach` attaches, see `unirl.reward.shaping.LengthShaping`; images and videos have none.
    Raises ConfigError for an impossible value.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer] | Sequence[Scorer],
        weights: Mapping[str, float] | None = None,
        on_failure: FailurePolicy = "raise",
        max_retries: int = 2,
        aggregation: Aggregation = "weighted_sum",
        device: str | None = None,
        truncated_reward: TruncatedReward = "zero",
        overlong_buffer_len: int | None = None,
        overlong_penalty_factor: float | None = None,
    ) -> None:
        if on_failure not in get_args(FailurePolicy):
            raise ConfigError(f"on_failure = {on_failure!r} must be one of {get_args(FailurePolicy)}")
        if aggregation not in get_args(Aggregation):
            raise ConfigError(f"aggregation = {aggregation!r} must be one of {get_args(Aggregation)}")
        if max_retries < 1:
            raise ConfigError(f"max_retries = {max_retries} must be at least 1; on_failure=raise is for no retries")
        self.scorers = _by_name(scorers)
        self.weights = checked_weights(list(self.scorers), weights, aggregation)
        self.on_failure: FailurePolicy = on_failure
        self.max_retries = max_retries
        self.aggregation: Aggregation = aggregation
        self._shaping = LengthShaping(truncated_reward, overlong_buffer_len, overlong_penalty_factor)
        if device is not None:
            for scorer in self._local_scorers():
                scorer.move_to(device)

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def score(self, request: RewardRequest) -> RewardResponse:
        """Rewards of B samples. component_rewards has each scorer's reward under its name, and
        `scorer/component` for a scorer with several. Raises RewardError as `on_failure` says."""
        started = time.perf_counter()
        counters = {"failed_samples": 0, "dropped_groups": 0, "retried_samples": 0}
        answers = {name: self._answer(name, scorer, request, counters) for name, scorer in self.scorers.items()}
        rewards_B = composed({name: answer.rewards for name, answer in answers.items()}, self.weights, self.aggregation)
        errors: list[str | None] = [None] * len(request.sample_ids)
        for name, answer in answers.items():
            for row, error in enumerate(answer.errors):
                if error is not None and errors[row] is None:
                    errors[row] = f"scorer {name}: {error}"
        counters["failed_samples"] = sum(error is not None for error in errors)
        counters["dropped_groups"] = _drop_groups(request, errors)
        failed = torch.tensor([error is not None for error in errors])
        return RewardResponse(
            sample_ids=list(request.sample_ids),
            rewards=torch.where(failed, torch.nan, rewards_B),
            component_rewards=_component_rewards(answers),
            successes=(~failed).tolist(),
            errors=errors,
            compute_s=time.perf_counter() - started,
            counters=counters,
        )

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def score_media(self, resp: RolloutResp, req: RolloutReq) -> RewardResponse:
        """Score the root track's decoded media and leave the response as it is (evaluation)."""
        return self.score(reward_request(resp.root_track(), req))

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def score_and_attach(self, resp: RolloutResp, req: RolloutReq) -> RewardResponse:
        """Score the root track's decoded media and write `rewards` and `component_rewards` into that track.

        Rewards of texts are shaped by their length; `component_rewards` stay as the scorers gave them.
        Changes `resp` in place. Raises ContractError where the track already has rewards or does not hold the
        samples of `req`.
        """
        track = resp.root_track()
        if track.rewards is not None:
            raise ContractError("this response already has rewards; score each rollout once")
        scored = self._shaped(self.score(reward_request(track, req)), track, req)
        track.rewards = scored.rewards
        track.component_rewards = dict(scored.component_rewards)
        resp.reward_compute_s += scored.compute_s
        return scored

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """The reward float32 [B] as `score` composes it, with gradients to the pixels of the request's images.

        Scorers of weight 0 are left out: they add nothing. Called in the process that trains, not over the runtime.
        Raises ConfigError naming the scorers with a weight that are not differentiable, and RewardError whatever
        `on_failure` says: a loss has no samples to drop.
        """
        used = {name: scorer for name, scorer in self.scorers.items() if self.weights[name]}
        wrong = [
            f"{name} ({type(scorer).__name__})"
            for name, scorer in used.items()
            if not (isinstance(scorer, LocalScorer) and scorer.is_differentiable)
        ]
        if wrong:
            raise ConfigError(
                f"scorers {', '.join(wrong)} are not differentiable, so this reward has no gradient. Use "
                "differentiable scorers, or give these the weight 0 in reward.weights, so that they only report."
            )
        zero_B = torch.zeros(len(request.sample_ids), device=request.pixels.device)
        rewards = {
            name: scorer.score_with_gradient(request) if name in used and isinstance(scorer, LocalScorer) else zero_B
            for name, scorer in self.scorers.items()
        }
        return composed(rewards, self.weights, self.aggregation)

    @distributed(Dispatch.BROADCAST)
    def offload(self) -> None:
        """Move every local scorer's modules to host memory."""
        for scorer in self._local_scorers():
            scorer.offload()

    @distributed(Dispatch.BROADCAST)
    def onload(self) -> None:
        """Move every local scorer's modules back to its device."""
        for scorer in self._local_scorers():
            scorer.onload()

    def _shaped(self, scored: RewardResponse, track: RolloutTrack, req: RolloutReq) -> RewardResponse:
        if not isinstance(track.segment, TextSegment):
            return scored
        params = req.sampling_params
        max_len = params.max_new_tokens if isinstance(params, ARSamplingParams) else None
        return scored.replace(rewards=self._shaping(scored.rewards, track.segment, max_len))

    def _local_scorers(self) -> list[LocalScorer]:
        return [scorer for scorer in self.scorers.values() if isinstance(scorer, LocalScorer)]

    def _answer(self, name: str, scorer: Scorer, request: RewardRequest, counters: dict[str, int]) -> RewardResponse:
        """One scorer's answer under the failure policy, its non-finite values marked as failures."""
        answer = self._ask(name, scorer, request)
        if self.on_failure == "retry":
            for _ in range(self.max_retries):
                rows = _failed_rows(answer)
                if not rows:
                    break
                counters["retried_samples"] += len(rows)
                answer = _patched(answer, rows, self._ask(name, scorer, request.select(rows)))
        rows = _failed_rows(answer)
        if rows and self.on_failure != "drop_group":
            failed = {request.sample_ids[row]: str(answer.errors[row]) for row in rows}
            tried = f" (after {self.max_retries} retries)" if self.on_failure == "retry" else ""
            raise RewardError(describe_failures(name, failed) + tried)
        return answer

    def _ask(self, name: str, scorer: Scorer, request: RewardRequest) -> RewardResponse:
        if isinstance(scorer, LocalScorer):
            try:
                return scorer.score_isolated(request, _ISOLATION[self.on_failure])
            except RewardError as error:
                if scorer.name == name:
                    raise
                raise RewardError(f"reward {name}: {error}") from error
        try:
            answer = scorer.score(request)
        except (ConfigError, ContractError):
            raise
        except SAMPLE_ERRORS as error:
            if self.on_failure == "raise":
                raise RewardError(f"scorer {name} failed: {type(error).__name__}: {error}") from error
            return _failure(request, f"{type(error).__name__}: {error}")
        return _checked_answer(name, answer, request)


def reward_request(track: RolloutTrack, req: RolloutReq) -> RewardRequest:
    """What the scorers are asked about a track: its decoded media with the inputs of `req`.

    Raises ContractError where the track has no media, or other samples than `req`.
    """
    if track.decoded is None:
        raise ContractError("the root track has no decoded media to score; ask the engine to decode")
    if track.sample_ids != req.sample_ids:
        raise ContractError(
            f"the track holds samples {track.sample_ids[:3]}... ({len(track.sample_ids)}) but the request "
            f"{req.sample_ids[:3]}... ({len(req.sample_ids)}); pass the request that the response answers"
        )
    return RewardRequest(
        sample_ids=list(track.sample_ids),
        group_ids=list(track.group_ids),
        primitives=dict(req.primitives),
        generated={media_slot(track.decoded): track.decoded},
        metadata=list(req.metadata),
    )


def _by_name(scorers: Mapping[str, Scorer] | Sequence[Scorer]) -> dict[str, Scorer]:
    named = list(scorers.items()) if isinstance(scorers, Mapping) else [(each.name, each) for each in scorers]
    names = [str(name) for name, _ in named]
    if not names:
        raise ConfigError("a reward service needs at least one scorer")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two scorers are called {twice}; give them names, or pass a mapping")
    wrong = [name for name in names if not name or "/" in name]
    if wrong:
        raise ConfigError(f"scorers cannot be called {wrong}; '/' separates scorer and component")
    for name, scorer in named:
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"{name} is a {type(scorer).__name__}, which is no scorer: it needs `name` and `score`")
    return {str(name): scorer for name, scorer in named}


def _failed_rows(answer: RewardResponse) -> list[int]:
    return [row for row, success in enumerate(answer.successes) if not success]


def _failure(request: RewardRequest, reason: str) -> RewardResponse:
    num_samples = len(request.sample_ids)
    return RewardResponse(
        sample_ids=list(request.sample_ids),
        rewards=torch.full((num_samples,), torch.nan),
        successes=[False] * num_samples,
        errors=[reason] * num_samples,
    )


def _checked_answer(name: str, answer: RewardResponse, request: RewardRequest) -> RewardResponse:
    """An answer of a scorer that is not ours: right samples, and no non-finite value that counts as a success."""
    if answer.sample_ids != request.sample_ids or answer.rewards.shape != (len(request.sample_ids),):
        raise ContractError(
            f"scorer {name} answered for {answer.sample_ids[:3]}..., rewards {tuple(answer.rewards.shape)}; it was "
            f"asked about {len(request.sample_ids)} samples {request.sample_ids[:3]}..."
        )
    errors: list[str | None] = list(answer.errors) or [None] * len(request.sample_ids)
    successes = list(answer.successes) or [True] * len(request.sample_ids)
    for row, value in enumerate(answer.rewards.tolist()):
        if errors[row] is None and not successes[row]:
            errors[row] = "it reported a failure without a reason"
        elif errors[row] is None and not torch.isfinite(answer.rewards[row]):
            errors[row] = f"its value is {value}"
    return dataclasses.replace(
        answer,
        rewards=answer.rewards.detach().to("cpu", torch.float32),
        successes=[error is None for error in errors],
        errors=errors,
    )


def _patched(answer: RewardResponse, rows: list[int], again: RewardResponse) -> RewardResponse:
    """`answer` with `rows` replaced by the rows of `again`."""
    rewards = answer.rewards.clone()
    rewards[rows] = again.rewards
    components = {key: value.clone() for key, value in answer.component_rewards.items()}
    for key, value in again.component_rewards.items():
        components.setdefault(key, torch.full_like(rewards, torch.nan))[rows] = value
    errors = list(answer.errors)
    for row, error in zip(rows, again.errors, strict=True):
        errors[row] = error
    return dataclasses.replace(
        answer,
        rewards=rewards,
        component_rewards=components,
        errors=errors,
        successes=[error is None for error in errors],
    )


def _drop_groups(request: RewardRequest, errors: list[str | None]) -> int:
    """Give every sample of a failed group an error. Returns how many groups failed."""
    group_ids = request.group_ids or request.sample_ids
    groups = failed_groups([error is None for error in errors], group_ids)
    culprits: dict[str, str] = {}
    for name, group, error in zip(request.sample_ids, group_ids, errors, strict=True):
        if error is not None:
            culprits.setdefault(group, name)
    for row, group in enumerate(group_ids):
        if group in culprits and errors[row] is None:
            errors[row] = f"group {group} is dropped because sample {culprits[group]} failed"
    return len(groups)


def _component_rewards(answers: Mapping[str, RewardResponse]) -> dict[str, Any]:
    """Each scorer's reward under its name and its components under `scorer/component`."""
    found = {}
    for name, answer in answers.items():
        found[name] = answer.rewards
        for key, value in answer.component_rewards.items():
            component = key.partition("/")[2]
            if component:
                found[f"{name}/{component}"] = value
    return found
