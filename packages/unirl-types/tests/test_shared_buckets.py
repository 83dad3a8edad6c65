"""Buckets that lie in the same memory one after the other, as another process maps them."""

import pytest
import torch

from unirl.types.errors import WeightSyncError
from unirl.types.shared_buckets import BucketReader, BucketWriter

HOST = torch.device("cpu")
BUCKETS = (
    {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(5, dtype=torch.int64)},
    {"c": torch.randn(100, 7).bfloat16()},  # larger
    {"d": torch.tensor([True, False]), "e": torch.zeros(0)},  # smaller
)


def test_each_bucket_is_read_before_the_next_is_written_over_it(tmp_path):
    writer, reader = BucketWriter(tmp_path, HOST), BucketReader()
    for bucket in BUCKETS * 2:
        found = reader.tensors(writer.write(bucket))
        assert found.keys() == bucket.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in bucket.items())
        reader.settle()
    assert len(list(tmp_path.iterdir())) == 1
    reader.forget()
    writer.drop()


def test_memory_that_cannot_be_mapped_is_named(tmp_path):
    with pytest.raises(WeightSyncError, match="weights cannot be read from .*gone"):
        BucketReader().tensors({"path": str(tmp_path / "gone")})
    with pytest.raises(WeightSyncError, match="memory of a GPU cannot be mapped: .*Remove sync.transport: ipc"):
        BucketReader().tensors({"num_bytes": 8})
