"""Texts of a unified model in a request's file: rows of token ids."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unirl.rollout.engine.vllm_omni.families import INTERVAL

FULL, FREE = "text", "negative_text"
"""Slots of the tokens to draw, and of those that replace them in the unconditional branch."""


def rows_of(tensors: Mapping[str, Tensor], slot: str, num_rows: int) -> list[list[int]]:
    """Token ids of each row in a slot, without padding; empty rows if there is no such slot."""
    if f"{slot}.ids" not in tensors:
        return [[]] * num_rows
    lengths = tensors[f"{slot}.mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(tensors[f"{slot}.ids"].tolist(), lengths, strict=True)]


def interval_of(settings: Mapping[str, object]) -> tuple[float, float]:
    """The two noise levels between which steps are guided."""
    low, high = settings.get(INTERVAL, (0.0, 1.0))  # ty: ignore[not-iterable] - checked by the trainer's pipeline
    return float(low), float(high)
