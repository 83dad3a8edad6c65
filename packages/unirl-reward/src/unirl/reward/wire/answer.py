"""The answer of POST /score, the same for both bodies:

    {"results": [{reward: {sub_metric: number}}], "errors": [{reward: reason}]}, one entry per sample.

The first sub-metric, `reward`, is the scorer's own reward; its components follow. A sample that could not be scored has
a reason and no number. Numbers are fp32 values in full, so both sides hold the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unirl.reward.wire.json_body import parsed_json
from unirl.reward.wire.samples import Limits
from unirl.types.errors import DataError
from unirl.types.reward import RewardResponse

OWN_REWARD = "reward"
"""Sub-metric that holds the scorer's own reward."""

_MAX_FLOAT32 = torch.finfo(torch.float32).max


@dataclass
class SampleAnswer:
    """What one sample got, by reward."""

    results: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def sub_metrics(response: RewardResponse) -> list[dict[str, float] | str]:
    """For every sample of one scorer's response: its numbers, or the reason why it has none."""
    components = {
        key.partition("/")[2]: value.tolist() for key, value in response.component_rewards.items() if "/" in key
    }
    found: list[dict[str, float] | str] = []
    for row, reward in enumerate(response.rewards.tolist()):
        reason = response.errors[row] if response.errors else None
        numbers = {OWN_REWARD: reward} | {key: values[row] for key, values in components.items()}
        wrong = {key: value for key, value in numbers.items() if not math.isfinite(value)}
        if reason is None and wrong:
            reason = f"its values are {wrong}"
        found.append(numbers if reason is None else reason)
    return found


def encode_answer(answers: Sequence[SampleAnswer]) -> bytes:
    """The JSON of the answers. Raises ValueError for a number that is not finite."""
    content = {"results": [each.results for each in answers], "errors": [each.errors for each in answers]}
    return json.dumps(content, allow_nan=False).encode()


def decode_answer(
    body: bytes, sample_ids: Sequence[str], rewards: Sequence[str], limits: Limits | None = None
) -> dict[str, RewardResponse]:
    """What each reward gave the samples that were sent, as its scorer would have answered here.

    A sample without a finite number has success False and a reason, also where the server said nothing.
    Raises DataError for a body that is no answer to these samples.
    """
    content = parsed_json(body, limits or Limits(), "the answer")
    results, errors = (_per_sample(content, key, len(sample_ids)) for key in ("results", "errors"))
    return {name: _response(name, list(sample_ids), results, errors) for name in rewards}


def _per_sample(content: Mapping[str, Any], key: str, num_samples: int) -> list[dict[str, Any]]:  # Any: JSON values
    found = content.get(key)
    if not isinstance(found, list) or len(found) != num_samples or not all(isinstance(each, dict) for each in found):
        size = len(found) if isinstance(found, list) else type(found).__name__
        raise DataError(f"the answer's {key} must be a list of {num_samples} objects, one per sample; got {size}")
    return found


def _response(
    name: str, sample_ids: list[str], results: list[dict[str, Any]], errors: list[dict[str, Any]]
) -> RewardResponse:
    reasons = [_reason(result.get(name), error.get(name)) for result, error in zip(results, errors, strict=True)]
    good = [result[name] for result, reason in zip(results, reasons, strict=True) if reason is None]
    keys = list(good[0]) if good else []
    values: dict[str, list[float]] = {key: [] for key in keys}
    for row, reason in enumerate(reasons):
        numbers = results[row][name] if reason is None else dict.fromkeys(keys, math.nan)
        if set(numbers) != set(keys):
            raise DataError(f"reward {name} answered with sub-metrics {sorted(numbers)} and {sorted(keys)}")
        for key in keys:
            values[key].append(float(numbers[key]))
    tensors = {key: torch.tensor(column, dtype=torch.float32) for key, column in values.items()}
    own = OWN_REWARD if OWN_REWARD in tensors else next(iter(tensors), OWN_REWARD)
    rewards = tensors.pop(own, torch.full((len(sample_ids),), torch.nan))
    return RewardResponse(
        sample_ids=sample_ids,
        rewards=rewards,
        component_rewards={f"{name}/{key}": value for key, value in tensors.items()} or {name: rewards.clone()},
        successes=[reason is None for reason in reasons],
        errors=reasons,
    )


def _reason(numbers: Any, error: Any) -> str | None:  # Any: JSON values
    """Why a sample has no reward; None where it has one."""
    if error is not None:
        return str(error)
    if not isinstance(numbers, dict) or not numbers:
        return "the server gave no value and no reason"
    wrong = {key: value for key, value in numbers.items() if not _is_number(value)}
    return f"the server's values {str(wrong)[:200]} are not finite fp32 numbers" if wrong else None


def _is_number(value: Any) -> bool:  # Any: JSON values
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT32
