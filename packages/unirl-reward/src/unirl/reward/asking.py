"""One scorer's answer under a failure policy: what is asked, what is asked again, and what counts as a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from unirl.reward.base import SAMPLE_ERRORS, Isolation, LocalScorer, describe_failures
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.protocols.rewards import Scorer
from unirl.types.reward import RewardRequest, RewardResponse

FailurePolicy = Literal["raise", "retry", "drop_group"]

_ISOLATION: dict[FailurePolicy, Isolation] = {"raise": "none", "retry": "batch", "drop_group": "sample"}


def ask_scorer(name: str, scorer: Scorer, request: RewardRequest, on_failure: FailurePolicy) -> RewardResponse:
    """The scorer's answer to B samples, its non-finite values marked as failures.

    Raises RewardError naming the scorer under `raise`; ConfigError, ContractError and bugs under every policy.
    """
    if isinstance(scorer, LocalScorer):
        try:
            return scorer.score_isolated(request, _ISOLATION[on_failure])
        except RewardError as error:
            if scorer.name == name:
                raise
            raise RewardError(f"reward {name}: {error}") from error
    try:
        answer = scorer.score(request)
    except (ConfigError, ContractError):
        raise
    except SAMPLE_ERRORS as error:
        if on_failure == "raise":
            raise RewardError(f"scorer {name} failed: {type(error).__name__}: {error}") from error
        return _failure(request, f"{type(error).__name__}: {error}")
    return _checked_answer(name, answer, request)


def ask_again(
    name: str,
    ask: Callable[[RewardRequest], RewardResponse],
    request: RewardRequest,
    answer: RewardResponse,
    on_failure: FailurePolicy,
    max_retries: int,
) -> tuple[RewardResponse, int]:
    """The first answer with its failed samples asked again where the policy says so, and how many were.

    ask: the scorer called `name`, as `ask_scorer` calls it.

    Raises RewardError if samples without a reward are left, except under `drop_group`.
    """
    num_retried = 0
    if on_failure == "retry":
        for _ in range(max_retries):
            rows = _failed_rows(answer)
            if not rows:
                break
            num_retried += len(rows)
            answer = _patched(answer, rows, ask(request.select(rows)))
    rows = _failed_rows(answer)
    if rows and on_failure != "drop_group":
        failed = {request.sample_ids[row]: str(answer.errors[row]) for row in rows}
        tried = f" (after {max_retries} retries)" if on_failure == "retry" else ""
        raise RewardError(describe_failures(name, failed) + tried)
    return answer, num_retried


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
