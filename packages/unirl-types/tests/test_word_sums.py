"""Sums of words: equal to a computation with Python's integers, and different for every fault of a push."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.types import weights, word_sums
from unirl.types.errors import WeightSyncError
from unirl.types.weights import (
    WeightBucket,
    checksums_as,
    joined_checksum,
    tensor_checksums,
    weight_buckets,
    weight_specs,
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (5, 40), (3, 300), (2, 1024), (1025,), (9_001,))
ROW = word_sums.ROW_WORDS


def random_bits(dtype, shape, seed):
    """Elements of any bits, so NaNs of every kind and both zeros too."""
    generator = torch.Generator().manual_seed(seed)
    num = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (num,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def data_of(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def split_mix(number):
    """Output `number` of SplitMix64 with seed 0, as published."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def signed(value, num_bits):
    return value - 2**num_bits if value >> num_bits - 1 else value


def reference(data):
    """The two sums of some bytes, with Python's integers."""
    data = data + bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)]
    text = ""
    for number in range(2):
        total = 0
        for row in range(-(-len(words) // ROW)):
            own = words[row * ROW : (row + 1) * ROW]
            inner = sum(word * split_mix(number * ROW + at) for at, word in enumerate(own)) % 2**64
            first = 2 * ROW + 4 * row + 2 * number
            total += (inner % 2**32) * split_mix(first) + signed(inner >> 32, 32) * split_mix(first + 1)
        text += f"{total % 2**64:016x}"
    return text


def test_the_sums_of_two_words_are_worked_out_by_hand():
    # The published first outputs of SplitMix64 with seed 0.
    assert word_sums.keys(torch.arange(2)).tolist() == [signed(k, 64) for k in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)]
    # One row: 3 * 0xE220A8397B1DCDAF - 2 * 0x6E789E6AA1B965F4 mod 2^64, whose halves are joined by keys 2048 and 2049.
    row = 0xC970BBD72DE69D25
    assert (3 * 0xE220A8397B1DCDAF - 2 * 0x6E789E6AA1B965F4) % 2**64 == row
    joined = (0x2DE69D25 * split_mix(2048) + (0xC970BBD7 - 2**32) * split_mix(2049)) % 2**64
    assert word_sums.word_sums([torch.tensor([3, -2], dtype=torch.int32)])[0][:16] == f"{joined:016x}"


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**31),
    chunk=st.sampled_from([1, 2, 3, 8192]),
)
def test_sums_are_those_of_pythons_integers_for_any_chunks(dtypes, shape, seed, chunk):
    tensors = [random_bits(dtype, shape, seed + at) for at, dtype in enumerate(dtypes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_sums, "_CHUNK_ROWS_OF_HOST", chunk)
        assert word_sums.word_sums(iter(tensors)) == [reference(data_of(tensor)) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_and_unaligned_tensors_have_the_sums_of_their_copies(dtype):
    own = random_bits(dtype, (6, 11), 3)
    shifted = torch.empty(own.nbytes + 1, dtype=torch.uint8)
    shifted[1:] = own.flatten().view(torch.uint8)
    odd = shifted[1:].view(dtype).view(6, 11) if own.element_size() == 1 else own[:, 1:]
    for tensor in (own.t(), own[::2], own[1:], odd):
        assert word_sums.word_sums([tensor]) == [reference(data_of(tensor))]


@given(
    size=st.integers(1, 10_000),
    seed=st.integers(0, 2**31),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_any_changed_byte_is_found(size, seed, where, flip):
    tensor = random_bits(torch.uint8, (size,), seed)
    other = tensor.clone()
    other[int(where * size)] ^= flip
    first, second = word_sums.word_sums([tensor, other])
    assert first[:16] != second[:16] and first[16:] != second[16:]


@given(size=st.integers(2, 3000), seed=st.integers(0, 2**31), data=st.data())
def test_two_swapped_words_are_found_and_flipped_signs_of_two_too(size, seed, data):
    """A sum of odd multiples, without words of half the width, does not see two flipped top bits."""
    tensor = random_bits(torch.int32, (size,), seed)
    one, two = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped, flipped = tensor.clone(), tensor.clone()
    swapped[one], swapped[two] = tensor[two], tensor[one]
    flipped[[one, two]] ^= -(2**31)
    own, after, signs = word_sums.word_sums([tensor, swapped, flipped])
    assert (own == after) == bool(tensor[one] == tensor[two])
    assert own[:16] != signs[:16] and own[16:] != signs[16:]


def test_swapped_rows_and_moved_blocks_are_found():
    rows = random_bits(torch.int32, (6, ROW), 5)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(seed)) for seed in range(30)]
    found = {tuple(order.tolist()): word_sums.word_sums([rows[order]])[0] for order in orders}
    assert len(set(found.values())) == len(found) > 20
    zeros = torch.zeros(4 * ROW, dtype=torch.int32)
    places = []
    for place in range(0, 4 * ROW, 97):
        zeros.zero_()[place] = 1
        places += word_sums.word_sums([zeros])
    assert len(set(places)) == len(places)


@pytest.fixture
def on_device(monkeypatch):
    """Tensors of the host are summed as those of a device are."""
    monkeypatch.setattr(weights, "sum_kind", lambda device: "words_128")


def test_a_bucket_says_its_kind_of_sums_and_finds_swapped_and_missing_tensors(on_device):
    sent = {name: random_bits(torch.bfloat16, (40, 33), seed) for seed, name in enumerate("abc")}
    (bucket,) = weight_buckets(sent.items(), policy_version=1, max_bytes=10**6)
    assert {spec.sum_kind for spec in bucket.specs} == {"words_128"}
    bucket.verify()
    for tensors in (
        {**sent, "a": sent["b"], "b": sent["a"]},
        {**sent, "c": sent["a"]},
        {**sent, "b": sent["b"].view(torch.float16)},
        {**sent, "b": sent["b"].view(33, 40)},
    ):
        with pytest.raises(WeightSyncError, match="arrived changed"):
            bucket.with_tensors(tensors).verify()
    with pytest.raises(WeightSyncError, match="holds"):
        bucket.with_tensors({name: sent[name] for name in "ab"}).verify()


def test_sums_of_pieces_are_those_of_the_pieces_and_find_a_missing_or_swapped_one(on_device):
    whole, stops = random_bits(torch.float32, (10, 7), 1), (4, 7, 10)
    pieces = [whole[:4], whole[4:7], whole[7:]]
    (spec,) = weight_specs({"a": whole})
    (sent,) = tensor_checksums([whole], "words_128", [stops])
    assert sent == joined_checksum(tensor_checksums(pieces, "words_128")) != spec.checksum
    said = WeightBucket(0, {"a": whole}, (type(spec)("a", (10, 7), "torch.float32", sent, stops, "words_128"),))
    said.verify()
    for wrong in (
        torch.cat([pieces[0], pieces[2], pieces[1]]),
        torch.cat([pieces[0], pieces[1], torch.zeros_like(pieces[2])]),
    ):
        with pytest.raises(WeightSyncError, match="arrived changed"):
            said.with_tensors({"a": wrong}).verify()


def test_specs_of_both_kinds_are_checked_as_each_says(on_device):
    tensors = {name: random_bits(torch.float32, (9, 9), seed) for seed, name in enumerate("abcd")}
    words = weight_specs(tensors)
    xxh3 = tensor_checksums(tensors.values(), "xxh3_128")
    mixed = [
        spec if at % 2 else type(spec)(spec.name, spec.shape, spec.dtype, xxh3[at]) for at, spec in enumerate(words)
    ]
    assert checksums_as(mixed, tensors.values()) == [spec.checksum for spec in mixed]
    with pytest.raises(WeightSyncError, match="install the same"):
        tensor_checksums([torch.zeros(1)], "crc")  # ty: ignore[invalid-argument-type]


class Counted(TorchDispatchMode):
    """Counts operations on tensors, views apart."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_tensors", [2, 50, 1190])
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(num_tensors, monkeypatch):
    monkeypatch.setattr(word_sums, "_CHUNK_ROWS_OF_HOST", 10_000)
    tensors = [random_bits(torch.bfloat16, (2, 77), seed) for seed in range(num_tensors)]
    word_sums.word_sums(tensors)  # makes the keys
    with Counted() as counted:
        word_sums.word_sums(tensors)
    assert len(counted.names) <= 60
    assert counted.names.count("cat") == 2  # the words, and the sums of rows
    assert not {"item", "_local_scalar_dense"} & set(counted.names)
