"""Files that an engine's processes read after pushes of all weights, and of what changed."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from unirl.rollout.engine.child.pushed_files import PushedFiles
from unirl.types.bucket_files import MEMORY, BucketFiles, MappedBuckets
from unirl.types.deltas import element_delta
from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightBucket, weight_buckets, weight_spec


@pytest.fixture(params=["memory", "disk"])
def folder(request, tmp_path):
    """In memory, where files are mapped, and elsewhere."""
    path = Path(MEMORY) / f"unirl-test-{os.getpid()}" if request.param == "memory" else tmp_path / "pushed"
    path.mkdir()
    yield path
    shutil.rmtree(path)


WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(40, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
    "d": torch.ones(4),
}


def buckets(tensors, version, base=None, since=WEIGHTS):
    """Buckets of two tensors; with `base`, of what changed since others."""

    def changes(spec, tensor):
        if base is None:
            return tensor
        if weight_spec(spec.name, since[spec.name]) == spec:
            return None
        delta = element_delta(since[spec.name], tensor).data
        return tensor if delta is None else delta

    return list(
        weight_buckets(
            tensors.items(),
            policy_version=version,
            max_bytes=130,
            base_version=base,
            changes=changes,
        )
    )


def push(files, *parts, version):
    files.begin()
    messages = [message for part in parts for message in files.take(part)]
    files.finish(version)
    return messages


def read(messages):
    """What a process finds in the files, of which it checks every tensor."""
    found, mapped = {}, MappedBuckets()
    for message in messages:
        tensors = mapped.tensors(message.path)
        WeightBucket(message.policy_version, tensors, tuple(message.specs)).verify()
        found.update({name: tensor.clone() for name, tensor in tensors.items()})
    return found


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_processes_read_whole_tensors_of_all_that_was_pushed_and_of_what_changed(folder):
    files, last = PushedFiles(folder), WEIGHTS
    whole = push(files, *buckets(WEIGHTS, 1), version=1)
    assert len(whole) == 2 and same(read(whole), WEIGHTS)
    for version in (2, 3, 4):
        now = {name: tensor.clone() for name, tensor in last.items()}
        now["a"][1, version - 2] = float("nan") if version == 2 else -0.0
        now["b"][3 * version] *= 2
        now["c"] = now["c"] + version % 2  # smaller than a delta: it travels whole
        (part,) = buckets(now, version, version - 1, last)
        messages = push(files, part, version=version)
        assert [message.path for message in messages] == [message.path for message in whole]
        assert {message.policy_version for message in messages} == {version}
        found = read(messages)
        assert all(
            torch.equal(found[name].view(-1).view(torch.uint8), now[name].reshape(-1).view(torch.uint8)) for name in now
        )
        assert files.num_bytes == part.num_bytes < 40
        last = now
    assert same(read(push(files, *buckets(WEIGHTS, 5), version=5)), WEIGHTS)


def test_a_file_is_read_when_its_last_tensor_has_come(folder):
    files = PushedFiles(folder)
    first, second = push(files, *buckets(WEIGHTS, 1), version=1)
    now = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    files.begin()
    paths = [
        [m.path for m in files.take(part)] for name in "badc" for part in buckets({name: now[name]}, 2, 1, WEIGHTS)
    ]
    assert [spec.name for spec in first.specs] == ["a", "b"]
    assert paths == [[], [first.path], [], [second.path]]


@pytest.mark.parametrize("is_finished", [True, False])
def test_changes_since_what_the_files_do_not_have_are_refused(folder, is_finished):
    files = PushedFiles(folder)
    files.begin()
    for part in buckets(WEIGHTS, 1):
        files.take(part)
    if is_finished:
        files.finish(1)
    files.begin()
    (changed,) = buckets(WEIGHTS, 3, 2 if is_finished else 1, WEIGHTS)
    with pytest.raises(WeightSyncError, match=r"changed since version \d, which the engine has no files of; push"):
        files.take(changed)
    files.begin()
    (changed,) = buckets(WEIGHTS, 3, 1, WEIGHTS)
    with pytest.raises(WeightSyncError, match="no files of"):  # since a push began and did not end
        files.take(changed)


def test_tensors_that_are_not_there_or_come_twice_and_damaged_changes_are_refused(folder):
    files = PushedFiles(folder)
    push(files, *buckets(WEIGHTS, 1), version=1)
    now = {**WEIGHTS, "b": WEIGHTS["b"].clone()}
    now["b"][0] = 9
    (part,) = buckets(now, 2, 1, WEIGHTS)
    files.begin()
    unknown = WeightBucket(2, {}, (), (weight_spec("e", torch.ones(2)),), 1)
    with pytest.raises(WeightSyncError, match=r"unknown: e \[2\]"):
        files.take(unknown)
    other = WeightBucket(2, {"d": torch.ones(5)}, (weight_spec("d", torch.ones(5)),), (), 1)
    with pytest.raises(WeightSyncError, match=r"shape: d is \[5\], expected \[4\]"):
        files.take(other)
    with pytest.raises(WeightSyncError, match=r"b arrived changed: 2 bytes are no delta of a tensor of 40"):
        files.take(part.with_tensors({"b": part.tensors["b"][:2]}))
    files.take(part)
    with pytest.raises(WeightSyncError, match="twice: a"):
        files.take(part)


def test_a_file_that_is_lent_is_read_where_it_is_and_is_no_base(folder):
    theirs = folder / "theirs"
    theirs.mkdir()
    path = str(BucketFiles(theirs).write(0, WEIGHTS))
    whole = WeightBucket(1, WEIGHTS, tuple(weight_spec(name, tensor) for name, tensor in WEIGHTS.items()), file=path)
    files = PushedFiles(folder)
    (message,) = push(files, whole, version=1)
    assert message.path == path and same(read([message]), WEIGHTS)
    files.begin()
    with pytest.raises(WeightSyncError, match="no files of"):
        files.take(buckets(WEIGHTS, 2, 1, WEIGHTS)[0])
