"""Packed attention against a plain softmax of each sample alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unirl.models.causal_lm import attention
from unirl.models.causal_lm.attention import Unpackable, packed_attention
from unirl.models.packing import Packing
from unirl.types.errors import ContractError

LENGTHS = [3, 1, 1, 7, 5, 5, 5, 3]
MODULE: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def tensors(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(1, 4, total, 8), (1, 2, total, 8), (1, 2, total, 8)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def by_hand(query, key, value, window: int | None) -> torch.Tensor:
    """[1, N, H, D]: each sample by itself, softmax written out, key heads shared by two query heads."""
    outputs, start = [], 0
    for length in LENGTHS:
        cut = slice(start, start + length)
        q = query[0, :, cut]
        k, v = (t[0, :, cut].repeat_interleave(2, dim=0) for t in (key, value))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        hidden = (distance < 0) | (distance >= (window or length))
        scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(hidden.to(q.device), -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("window", [None, 4, 100])
def test_each_sample_attends_to_its_own_past_alone(window):
    packing = Packing.of(LENGTHS, torch.device("cpu"))
    inputs = tensors()
    out, _ = packed_attention(MODULE, *inputs, None, packing=packing, scaling=0.3, sliding_window=window)
    expected = by_hand(*inputs, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs), rtol=0, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4])
def test_the_ragged_kernel_of_a_gpu_agrees(window):
    inputs = tensors(torch.bfloat16, "cuda")
    packing = Packing.of(LENGTHS, torch.device("cuda"))
    out, _ = packed_attention(MODULE, *inputs, None, packing=packing, scaling=0.3, sliding_window=window)
    expected = by_hand(*(tensor.float() for tensor in inputs), window)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=3e-2)  # bfloat16 has 8 bits


def test_neighbours_of_equal_length_share_a_call(monkeypatch):
    calls = []
    attend = attention.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        calls.append(tuple(query.shape))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    packed_attention(MODULE, *tensors(), None, packing=Packing.of(LENGTHS, torch.device("cpu")))
    assert calls == [(1, 4, 3, 8), (2, 4, 1, 8), (1, 4, 7, 8), (3, 4, 5, 8), (1, 4, 3, 8)]


def test_a_packing_that_does_not_fit_is_refused():
    query, key, value = tensors()
    with pytest.raises(ContractError, match="packed samples of 4 positions lie in one row"):
        packed_attention(MODULE, query, key, value, None, packing=Packing.of([4], torch.device("cpu")))
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool)
    with pytest.raises(ContractError, match="and a mask"):
        packed_attention(MODULE, query, key, value, mask, packing=Packing.of(LENGTHS, torch.device("cpu")))


@pytest.mark.parametrize("beyond", [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_what_sdpa_would_ignore_is_refused(beyond):
    packing = Packing.of(LENGTHS, torch.device("cpu"))
    with pytest.raises(Unpackable, match=next(iter(beyond))):
        packed_attention(MODULE, *tensors(), None, packing=packing, **beyond)
