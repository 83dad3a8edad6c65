"""Joins the answers of several scorers to one response, in which samples that failed have no reward.

Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.reward.asking import FailurePolicy
from unirl.reward.compose import Aggregation, composed
from unirl.reward.grouping import fail_groups
from unirl.types.episodes import EPISODE
from unirl.types.errors import ContractError, RewardError, as_sentence
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import SegmentStatus


def joined(
    answers: Mapping[str, RewardResponse],
    request: RewardRequest,
    weights: Mapping[str, float],
    aggregation: Aggregation,
    num_retried: int,
) -> RewardResponse:
    """One response of all scorers to a request of B samples. A sample that one of them could not score is failed, and
    its group with it.

    answers: scorer -> its answer. weights: of the same scorers. num_retried: samples that were asked about again.
    """
    errors: list[str | None] = [None] * len(request.sample_ids)
    for name, answer in answers.items():
        errors = first_errors(errors, [None if error is None else f"scorer {name}: {error}" for error in answer.errors])
    num_failed = sum(error is not None for error in errors)
    num_dropped = _drop_groups(request.sample_ids, request.group_ids or request.sample_ids, errors)
    failed_B = torch.tensor([error is not None for error in errors])
    rewards_B = composed({name: answer.rewards for name, answer in answers.items()}, weights, aggregation)
    return RewardResponse(
        sample_ids=list(request.sample_ids),
        rewards=torch.where(failed_B, torch.nan, rewards_B),
        component_rewards=_component_rewards(answers),
        successes=(~failed_B).tolist(),
        errors=errors,
        counters={"failed_samples": num_failed, "dropped_groups": num_dropped, "retried_samples": num_retried},
    )


def completed(
    track: RolloutTrack, scored: RewardResponse, weights: Mapping[str, float], aggregation: Aggregation
) -> RewardResponse:
    """The answer of some scorers with what those elsewhere have written into the track. weights: of all scorers."""
    found = {**track.component_rewards, **scored.component_rewards}
    raw = {name: found[name] for scorer in weights for name in found if name.partition("/")[0] == scorer}
    missing = sorted(set(weights) - set(raw))
    if missing:
        raise ContractError(f"scorers {missing} of other pools have not scored this track; call score_part first")
    errors = first_errors(track.reward_errors, scored.errors)
    _drop_groups(track.sample_ids, track.group_ids, errors)
    failed_B = torch.tensor([error is not None for error in errors])
    rewards_B = composed({name: raw[name] for name in weights}, weights, aggregation)
    return scored.replace(
        rewards=torch.where(failed_B, torch.nan, rewards_B),
        component_rewards=raw,
        successes=(~failed_B).tolist(),
        errors=errors,
    )


def without_failed_episodes(track: RolloutTrack, scored: RewardResponse, on_failure: FailurePolicy) -> RewardResponse:
    """The answer without rewards for groups with an episode whose environment failed: what came of it says nothing
    about the policy. Raises RewardError unless `on_failure` is drop_group."""
    status = None if track.segment is None else track.segment.status
    failed = [] if status is None else (status == SegmentStatus.FAILED).nonzero().flatten().tolist()
    if not failed:
        return scored
    rows = track.metadata or [None] * track.batch_size
    reasons = {row: str(((rows[row] or {}).get(EPISODE) or {}).get("reason")) for row in failed}
    if on_failure != "drop_group":
        row, reason = next(iter(reasons.items()))
        raise RewardError(
            f"{len(failed)} episodes failed, first {track.sample_ids[row]}: {as_sentence(reason)} Mend the "
            "environment, or set reward.on_failure: drop_group, which replaces their groups by other prompts."
        )
    errors = [scored.errors[row] or reasons.get(row) for row in range(track.batch_size)]
    num_dropped = _drop_groups(track.sample_ids, track.group_ids, errors)
    is_known = torch.tensor([error is None for error in errors])
    counters = scored.counters or {}
    return scored.replace(
        rewards=torch.where(is_known, scored.rewards, torch.nan),
        successes=is_known.tolist(),
        errors=errors,
        counters={**counters, "dropped_groups": num_dropped},
    )


def first_errors(earlier: Sequence[str | None], later: Sequence[str | None]) -> list[str | None]:
    """The first error of each sample; no sample had one where `earlier` is empty."""
    return [one or other for one, other in zip(earlier or [None] * len(later), later, strict=True)]


def _drop_groups(sample_ids: Sequence[str], group_ids: Sequence[str], errors: list[str | None]) -> int:
    """Give every sample of a failed group an error. Returns how many groups failed."""
    return fail_groups(sample_ids, group_ids, errors, "is dropped")


def _component_rewards(answers: Mapping[str, RewardResponse]) -> dict[str, Tensor]:
    """Each scorer's reward under its name and its components under `scorer/component`."""
    found = {}
    for name, answer in answers.items():
        found[name] = answer.rewards
        for key, value in answer.component_rewards.items():
            component = key.partition("/")[2]
            if component:
                found[f"{name}/{component}"] = value
    return found
