"""Memory of this machine's GPU, as another process of the same machine maps it."""

import multiprocessing

import pytest
import torch

from unirl.types.device_kinds import kind_of
from unirl.types.shared_buckets import BucketReader, BucketWriter
from unirl.types.weights import WeightBucket, weight_specs

pytestmark = pytest.mark.gpu

SIZES = (1 << 20, 5 << 20, 3)


def read(places, answers):
    """Verify buckets until one is None."""
    reader = BucketReader()
    while (said := places.get()) is not None:
        place, specs = said
        bucket = WeightBucket(0, reader.tensors(place), specs)
        bucket.verify()
        answers.put({str(tensor.device.type) for tensor in bucket.tensors.values()})
        reader.settle()
    reader.forget()
    answers.put(None)


def test_another_process_reads_what_is_written_over_and_over(device, tmp_path):
    if not kind_of(device).shares_memory:
        pytest.skip(f"{device} has no memory that processes share")
    context = multiprocessing.get_context("spawn")
    places, answers = context.Queue(), context.Queue()
    process = context.Process(target=read, args=(places, answers), daemon=True)
    process.start()
    writer = BucketWriter(tmp_path, torch.device(device, 0))
    for seed, size in enumerate(SIZES * 3):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(size, generator=generator).to(device, dtype)
            for name, dtype in (("a", torch.bfloat16), ("b", torch.float32))
        }
        specs = tuple(weight_specs(tensors))
        places.put((writer.write(tensors), specs))
        assert answers.get(timeout=120) == {device}
    places.put(None)
    assert answers.get(timeout=60) is None
    process.join(60)
    writer.drop()
    assert not list(tmp_path.iterdir())
