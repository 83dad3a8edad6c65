"""The experts that tokens of a rollout went to, kept in the conditions of its samples for their replays."""

from __future__ import annotations

from unirl.models.adapter import require_condition
from unirl.types.conditions import Condition, ExpertCondition, PromptCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.segments import TextSegment

EXPERTS = "experts"
"""Slot of the experts that tokens went to."""


def require_dict(conditions: Conditions) -> dict[str, Condition]:
    """Conditions that a slot can be added to. Raises ContractError for others."""
    if not isinstance(conditions, dict):
        raise ContractError(f"conditions must be a dict to keep experts in, got {type(conditions).__name__}")
    return conditions


def check_experts(conditions: Conditions, segment: TextSegment) -> None:
    """Raises ContractError for kept experts that are not of as many tokens as a replay of the segment reads."""
    if EXPERTS not in conditions:
        return
    kept = require_condition(conditions, EXPERTS, ExpertCondition).lengths.tolist()
    prompts = require_condition(conditions, "prompt", PromptCondition).lengths.tolist()
    read = [prompt + max(0, said - 1) for prompt, said in zip(prompts, segment.lengths.tolist(), strict=True)]
    if kept != read:
        raise ContractError(
            f"expert indices of another batch: they are of {kept[:8]} tokens, the samples read {read[:8]}"
        )
