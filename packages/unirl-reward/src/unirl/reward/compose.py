"""Joining the rewards of several scorers into one. Pure functions of tensors and ids.

Legend: B samples.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError

Aggregation = Literal["weighted_sum", "weighted_mean"]


def checked_weights(
    scorers: Sequence[str], weights: Mapping[str, float] | None, aggregation: Aggregation
) -> dict[str, float]:
    """Weight of every scorer; 1 each where `weights` is None.

    Raises ConfigError for an unknown or missing scorer, a non-finite weight, weights that are all 0, and for a
    weighted mean whose weights sum to 0.
    """
    if weights is None:
        weights = dict.fromkeys(scorers, 1.0)
    for name in weights:
        if name not in scorers:
            near = difflib.get_close_matches(name, scorers, n=3) or sorted(scorers)
            raise ConfigError(f"weights name {name!r}, which is no scorer. Did you mean one of {near}?")
    missing = [name for name in scorers if name not in weights]
    if missing:
        raise ConfigError(f"weights give nothing for {missing}. Add them; 0 records a scorer without rewarding it.")
    wrong = {name: weight for name, weight in weights.items() if not math.isfinite(weight)}
    if wrong:
        raise ConfigError(f"weights must be finite numbers, got {wrong}")
    if not any(weights.values()):
        raise ConfigError(f"weights are all 0 ({dict(weights)}), so every reward would be 0. Set one.")
    if aggregation == "weighted_mean" and math.fsum(weights.values()) == 0:
        raise ConfigError(f"weights {dict(weights)} sum to 0, so there is no weighted mean. Use weighted_sum.")
    return {name: float(weights[name]) for name in scorers}


def composed(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], aggregation: Aggregation = "weighted_sum"
) -> Tensor:
    """One reward per sample: sum over scorers of weight * value, raw values; float32 [B].

    rewards: scorer -> float32 [B]. weighted_mean divides by the sum of the weights. A NaN stays NaN: nothing is
    renormalised over the scorers that are left. Sums run in float64 in the order of the names, so the order of the
    mappings does not change a bit. Raises ContractError if the two name different scorers.
    """
    if set(rewards) != set(weights):
        raise ContractError(f"rewards of {sorted(rewards)} cannot be weighted by weights of {sorted(weights)}")
    names = sorted(rewards)
    total_B = torch.zeros_like(rewards[names[0]], dtype=torch.float64)
    for name in names:
        total_B = total_B + weights[name] * rewards[name].double()
    if aggregation == "weighted_mean":
        total_B = total_B / math.fsum(weights.values())
    return total_B.float()


def failed_groups(successes: Sequence[bool], group_ids: Sequence[str]) -> list[str]:
    """Groups with at least one failed sample, in order of first appearance."""
    failed = {group for group, success in zip(group_ids, successes, strict=True) if not success}
    return [group for group in dict.fromkeys(group_ids) if group in failed]
