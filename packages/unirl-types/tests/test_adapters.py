"""Merging of LoRA adapters."""

import pytest
import torch

from unirl.types.adapters import FACTOR_A, FACTOR_B, factor_pairs, merged_weight
from unirl.types.errors import ContractError


def test_a_merged_layer_computes_what_layer_and_adapter_do():
    generator = torch.Generator().manual_seed(0)
    base, a, b, x = (torch.randn(shape, generator=generator) for shape in ((5, 7), (2, 7), (5, 2), (7,)))
    merged = merged_weight(base, a, b, rank=2, alpha=6.0)
    expected = base.double() @ x.double() + 3.0 * (b.double() @ (a.double() @ x.double()))
    torch.testing.assert_close((merged @ x).double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(merged_weight(base[1:3], a, b, rank=2, alpha=6.0, rows=(1, 3)), merged[1:3])
    assert torch.equal(merged_weight(base, a, b, rank=2, alpha=6.0, dtype=torch.bfloat16), merged.bfloat16())


def test_factors_come_in_pairs():
    a, b = torch.zeros(2, 3), torch.zeros(4, 2)
    assert factor_pairs({"x" + FACTOR_B: b, "x" + FACTOR_A: a}) == {"x": (a, b)}
    with pytest.raises(ContractError, match=r"an A and a B of each layer; this one has x\.lora_A\.weight"):
        factor_pairs({"x" + FACTOR_A: a})
    with pytest.raises(ContractError, match="y, z"):
        factor_pairs({"y": a, "z": b})
