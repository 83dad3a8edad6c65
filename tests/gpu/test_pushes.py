"""Checksums of weights on this machine's accelerator are those of a CPU."""

import pytest
import torch

from unirl.types.bucket_files import BucketLayout
from unirl.types.deltas import element_delta
from unirl.types.weights import tensor_checksums, weight_buckets
from unirl.types.word_sums import word_sums

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool)
SHAPES = ((), (0,), (1,), (7,), (5, 40), (3, 1025), (1 << 20,), (3000, 4001))


def weights():
    """Tensors of random bits: empty, odd, and larger than what is summed at once."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            num = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
            high = 2 if dtype == torch.bool else 256
            data = torch.randint(0, high, (num,), dtype=torch.uint8, generator=generator)
            found[f"{dtype} {shape}"] = data.view(dtype).view(shape)
    return found


def test_sums_of_words_are_those_of_a_cpu(device):
    tensors = list(weights().values())
    expected = word_sums(tensors)
    there = [tensor.to(device) for tensor in tensors]
    assert word_sums(there) == expected
    assert word_sums(reversed(there)) == expected[::-1]
    matrices = [tensor for tensor in tensors if tensor.dim() == 2]
    assert word_sums([tensor.to(device).t() for tensor in matrices]) == word_sums([tensor.t() for tensor in matrices])


def test_pieces_and_both_kinds_agree_with_a_cpu(device):
    whole = weights()["torch.bfloat16 (3000, 4001)"]
    for kind in ("xxh3_128", "words_128"):
        here, there = (tensor_checksums([tensor], kind, [(7, 900, 3000)]) for tensor in (whole, whole.to(device)))
        assert here == there


def test_a_bucket_is_summed_packed_and_verified_on_the_device(device):
    sent = {name: tensor.to(device) for name, tensor in weights().items()}
    for bucket in weight_buckets(sent.items(), policy_version=1, max_bytes=30_000_000):
        assert {spec.sum_kind for spec in bucket.specs} == {"words_128"}
        layout = BucketLayout.of(bucket.tensors)
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        layout.write(bucket.tensors, buffer)
        arrived = bucket.with_tensors(layout.views(buffer))
        arrived.verify()
        arrived.with_tensors({name: tensor.cpu() for name, tensor in arrived.tensors.items()}).verify()


def test_sums_take_bounded_memory_and_few_launches(device):
    if not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        pytest.skip("torch does not count the memory of this device")
    tensors = [torch.ones(512, 1024, device=device) for _ in range(256)]  # 512 MB
    word_sums(tensors)
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    with torch.profiler.profile() as profile:
        word_sums(tensors)
    assert module.max_memory_allocated() - before < 160e6
    launches = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)
    assert launches < 300  # 16 chunks of about 6 operations, and 60 at the end


def test_elements_that_changed_on_the_device_make_the_delta_of_a_cpu(device):
    for base in weights().values():
        tensor = base.clone()
        if base.numel() > 2:
            tensor.view(-1)[1::50] = base.view(-1)[0]
        here, there = element_delta(base, tensor), element_delta(base, tensor.to(device))
        assert here.num_changed == there.num_changed and (here.data is None) == (there.data is None)
        if here.data is not None and there.data is not None:
            assert torch.equal(here.data, there.data)
