"""LoRA adapters: their pairs of factors, and how these are merged into a layer's weight (arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.types.errors import ContractError
from unirl.types.weights import UpdateTally

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of a layer's factors."""


def factor_pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> its factors A [r, I] and B [O, r], from the tensors of an adapter. Raises ContractError if a tensor is
    no factor, or one of a pair is missing."""
    layers = {name.removesuffix(end) for name in tensors for end in (FACTOR_A, FACTOR_B) if name.endswith(end)}
    if tensors.keys() != {layer + end for layer in layers for end in (FACTOR_A, FACTOR_B)}:
        raise ContractError(f"an adapter has an A and a B of each layer; this one has {', '.join(sorted(tensors))}")
    return {layer: (tensors[layer + FACTOR_A], tensors[layer + FACTOR_B]) for layer in sorted(layers)}


@torch.no_grad()
def merged_weight(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    rank: int,
    alpha: float,
    dtype: torch.dtype | None = None,
    tally: UpdateTally | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """W + (alpha / rank) B A, computed in float32 and returned in W's dtype or another. W [O, I], A [r, I], B [O, r].

    tally: is told what the rounding takes. rows: those of W that `base` has; None for all.
    """
    delta = (b.float() @ a.float()) * (alpha / rank)
    if rows is not None:
        delta = delta[slice(*rows)]  # of the whole product, whose bits a product of these rows alone need not have
    merged = (base.float() + delta).to(base.dtype if dtype is None else dtype)
    if tally is not None:
        tally.add(base, delta, merged)
    return merged
