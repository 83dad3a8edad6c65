"""Deltas of tensors: applied to the base they give the tensor, bit for bit, and are smaller than it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.deltas import element_delta, on_host, put_delta, with_delta
from unirl.types.errors import WeightSyncError
from unirl.types.weights import tensor_checksum

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (5, 40), (3, 300), (70_000,))


def random_bits(dtype, shape, seed):
    """Elements of any bits, so NaNs of every kind and both zeros too."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    num = torch.Size(shape).numel() * size
    data = torch.randint(0, high, (num,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from(SHAPES),
    density=st.sampled_from([0.0, 1e-4, 0.003, 0.02, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**31),
    is_transposed=st.booleans(),
)
def test_a_delta_makes_the_tensor_of_its_base_bit_for_bit_and_is_smaller(dtype, shape, density, seed, is_transposed):
    base, other = random_bits(dtype, shape, seed), random_bits(dtype, shape, seed + 1)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    size = base.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    tensor = torch.where(mask, other.view(bits), base.view(bits)).view(dtype) if shape else other
    if is_transposed and len(shape) == 2:
        base, tensor = base.t(), tensor.t()
    kept = tensor_checksum(base)
    changed = int((base.contiguous().view(-1).view(bits) != tensor.contiguous().view(-1).view(bits)).sum())
    delta = element_delta(base, tensor)
    assert delta.num_changed == changed
    if delta.data is None:
        assert 1 + changed * size + -(-tensor.numel() // 8) >= tensor.nbytes
    else:
        assert delta.data.nbytes < tensor.nbytes
        found = with_delta(base, delta.data)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert tensor_checksum(found) == tensor_checksum(tensor)
        assert tensor_checksum(base) == kept
        put_delta(base, delta.data)
        assert tensor_checksum(base) == tensor_checksum(tensor)


def test_zeros_of_either_sign_differ_and_a_nan_is_itself():
    base = torch.tensor([0.0, float("nan"), 1.0, *range(20)])
    tensor = base.clone()
    tensor[0] = -0.0
    delta = element_delta(base, tensor)
    assert delta.num_changed == 1 and delta.data is not None
    assert with_delta(base, delta.data)[0].signbit()


@pytest.mark.parametrize(
    ("places", "num_bytes"),
    [
        ([255], 1 + 1 + 2),
        ([256], 1 + 2 + 2),  # a gap of two bytes is cheaper than an element in between
        ([0, 1, 2, 3, 4, 5, 300], 1 + 8 * 3),  # and an element in between than larger gaps
        ([70_000 - 1], 1 + 4 + 2),
        ([65_535], 1 + 2 + 2),
        ([65_536], 1 + 4 + 2),
        (range(0, 70_000, 9), 1 + 7778 * 3),
        (range(0, 70_000, 7), 1 + 8_750 + 10_000 * 2),  # a bit for each
    ],
)
def test_a_delta_takes_the_gaps_that_cost_least(places, num_bytes):
    base = torch.zeros(70_000, dtype=torch.bfloat16)
    tensor = base.clone()
    tensor[list(places)] = 1.0
    delta = element_delta(base, tensor).data
    assert delta is not None and delta.nbytes == num_bytes
    assert torch.equal(with_delta(base, delta), tensor)


def test_a_hundredth_of_the_elements_in_bf16_are_a_sixtieth_of_the_bytes():
    base = torch.zeros(1_000_000, dtype=torch.bfloat16)
    tensor = base.masked_fill(torch.rand(len(base), generator=torch.Generator().manual_seed(0)) < 0.01, 1.0)
    delta = element_delta(base, tensor).data
    assert delta is not None and 0.015 < delta.nbytes / tensor.nbytes < 0.017


@pytest.mark.parametrize(
    "damage",
    [
        lambda delta: delta[:-1],
        lambda delta: delta[:0],
        lambda delta: torch.cat([delta.new_tensor([3]), delta[1:]]),
        lambda delta: torch.cat([delta.new_tensor([0]), delta[1:]]),  # gaps are no bits
        lambda delta: torch.cat([delta[:1], delta.new_tensor([200]), delta[2:]]),  # beyond the end
    ],
)
def test_bytes_that_are_no_delta_of_the_tensor_are_refused_and_write_nothing(damage):
    base = torch.zeros(90)
    delta = element_delta(base, base.index_fill(0, torch.tensor([4]), 1.0)).data
    assert delta is not None
    with pytest.raises(WeightSyncError, match=r"\d+ bytes are no delta of a tensor of 90 torch.float32"):
        put_delta(base, damage(delta))
    assert not base.any()


def test_deltas_of_a_device_come_to_the_host_together(monkeypatch):
    deltas = {name: torch.arange(size, dtype=torch.uint8) for name, size in (("a", 3), ("b", 0), ("c", 7))}
    assert on_host(deltas) == deltas and on_host({}) == {}

    monkeypatch.setattr("unirl.types.deltas.is_accelerator", lambda device: True)
    found = on_host(deltas)
    assert all(torch.equal(found[name], delta) for name, delta in deltas.items()) and found.keys() == deltas.keys()
