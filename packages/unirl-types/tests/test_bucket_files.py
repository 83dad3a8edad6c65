"""Buckets of weights as safetensors files: what is written, what another process maps, and what is refused."""

import errno
import os

import pytest
import torch

from unirl.types.bucket_files import MEMORY, BucketFiles, BucketLayout, MappedBuckets
from unirl.types.errors import WeightSyncError


@pytest.fixture(params=["memory", "disk"])
def folder(request, tmp_path):
    """In memory, where files are mapped, and elsewhere."""
    if request.param == "disk":
        yield tmp_path
        return
    path = tmp_path.__class__(MEMORY) / f"unirl-test-{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def tensors(factor=1):
    return {
        "half": torch.arange(3, dtype=torch.bfloat16) * factor,
        "whole": torch.arange(6.0).view(2, 3) * factor,
        "turned": torch.arange(6.0).view(2, 3).t() * factor,
        "number": torch.tensor(7) * factor,
        "empty": torch.zeros(0, 4),
    }


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_what_is_written_is_read_and_written_over_in_place(folder):
    files, mapped = BucketFiles(folder), MappedBuckets()
    for factor in (1, 2, 3):
        path = files.write(0, tensors(factor))
        assert equal(mapped.tensors(str(path)), tensors(factor))
    assert [file.name for file in folder.iterdir()] == ["bucket-0.safetensors"]


def test_a_file_in_memory_stays_mapped_on_both_sides(folder):
    files, mapped = BucketFiles(folder), MappedBuckets()
    first = mapped.tensors(str(files.write(0, tensors())))
    second = mapped.tensors(str(files.write(0, tensors(2))))
    stays = first["whole"].data_ptr() == second["whole"].data_ptr()
    assert stays == str(folder).startswith(MEMORY)


def test_a_bucket_of_another_size_takes_the_place_of_the_last(folder):
    files, mapped = BucketFiles(folder), MappedBuckets()
    for size in (2000, 3, 5000):
        path = files.write(0, {"a": torch.full((size,), float(size))})
        assert equal(mapped.tensors(str(path)), {"a": torch.full((size,), float(size))})


def test_other_readers_of_safetensors_take_the_files(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    path = BucketFiles(folder).write(0, tensors())
    assert equal(safetensors.load_file(path), tensors())
    safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, folder / "theirs")
    assert equal(MappedBuckets().tensors(str(folder / "theirs")), tensors())


def test_a_file_that_is_gone_or_lost_its_end_is_refused_and_its_memory_given_back(folder):
    files, mapped = BucketFiles(folder), MappedBuckets()
    path = files.write(0, tensors())
    mapped.tensors(str(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightSyncError, match=r"cannot be read from .*bucket-0.*: it holds \d+ bytes, expected \d+\."):
        mapped.tensors(str(path))
    path.unlink()
    with pytest.raises(WeightSyncError, match="cannot be read from .*No such file"):
        mapped.tensors(str(path))
    mapped.forget_removed()
    assert mapped._kept == {}


def test_a_folder_without_room_is_told_before_anything_is_written(monkeypatch, folder):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    if str(folder).startswith(MEMORY):
        with pytest.raises(WeightSyncError, match=r"0.0 MB cannot be written to .*No space left .* Free space there"):
            BucketFiles(folder).write(0, tensors())


def test_every_tensor_is_aligned_to_its_elements():
    layout = BucketLayout.of(tensors())
    for _, dtype, _, start, _ in layout.spans:
        assert start % torch.empty(0, dtype=dtype).element_size() == 0
    assert len(layout.header) % 64 == 0
