"""A stranger's checkpoint is data: none of its files can make the process that loads it run something."""

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import saved_run, snapshot, start
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from unirl.train.backend.manifest import MANIFEST, read_manifest, write_manifest
from unirl.train.backend.state_reader import StateReader
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.types.errors import CheckpointError

PARAMETER = "parameters/transformer.proj_in.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    saved_run(folder, num_saves=1)
    return folder / "step-000001"


class Touch:
    """Unpickles to a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def stored(folder: Path) -> Metadata:
    return pickle.loads((folder / "state" / ".metadata").read_bytes())


def hostile(sound: Path, run: Path, content: bytes) -> Path:
    """A copy of a sound checkpoint with other metadata, whose manifest an attacker has brought up to date."""
    folder = run / sound.name
    shutil.copytree(sound, folder)
    facts, _ = read_manifest(folder)
    del facts["files"]
    (folder / MANIFEST).unlink()
    (folder / "state" / ".metadata").write_bytes(content)
    write_manifest(folder, facts)
    return run


def assert_refused(run: Path, message: str) -> None:
    backend, _ = start({})
    before = snapshot(backend)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(backend, str(run)).load()
    assert all(torch.equal(value, before[name]) for name, value in snapshot(backend).items())


def test_metadata_that_would_run_code_is_refused_by_the_name_of_what_it_calls(sound: Path, tmp_path: Path):
    metadata = stored(sound)
    metadata.planner_data = Touch(tmp_path / "owned")
    run = hostile(sound, tmp_path / "run", pickle.dumps(metadata))
    assert_refused(run, r"names pathlib\.Path\.touch|names builtins\.getattr")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"cos\nsystem\n(S'exit 1'\ntR.", r"os\.system"),
        (b"cposix\nsystem\n(S'exit 1'\ntR.", r"posix\.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", r"builtins\.eval"),
        (b"ctorch\nload\n(S'x'\ntR.", r"torch\.load"),
        (b"\x80\x04\x8c\x05torch\x8c\x12serialization.load\x93.", r"torch\.serialization\.load"),
        (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0bos.path.sep\x93.",
            r"torch\.distributed\.checkpoint\.metadata\.os\.path\.sep",
        ),
    ],
)
def test_every_foreign_name_is_refused(content: bytes, name: str, sound: Path, tmp_path: Path):
    assert_refused(hostile(sound, tmp_path, content), f"names {name}, which")


def test_an_object_among_the_tensors_which_dcp_would_unpickle_is_refused(sound: Path, tmp_path: Path):
    metadata = stored(sound)
    metadata.state_dict_metadata[PARAMETER] = BytesStorageMetadata()
    run = hostile(sound, tmp_path / "run", pickle.dumps(metadata))
    buffer = io.BytesIO()
    torch.save(Touch(tmp_path / "owned"), buffer)
    data = run / "step-000001" / "state" / "__0_0.distcp"
    data.write_bytes(buffer.getvalue())
    facts, _ = read_manifest(data.parents[1])
    del facts["files"]
    (data.parents[1] / MANIFEST).unlink()
    write_manifest(data.parents[1], facts)
    assert_refused(run, f"entry {PARAMETER} is a pickled object")
    assert not (tmp_path / "owned").exists()


def test_a_pickle_that_sets_attributes_of_known_classes_changes_none_of_them(sound: Path, tmp_path: Path):
    # BUILD with (None, {...}) sets attributes of whatever lies on the stack, here of the class itself.
    content = (
        b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n"
        b"(N(dS'size'\nctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\nstb."
    )
    assert_refused(hostile(sound, tmp_path, content), "is not the metadata of a checkpoint")
    assert not hasattr(TensorStorageMetadata, "size")


def elsewhere(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../../other/__0_0.distcp"


def absolute(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "/etc/hostname"


@pytest.mark.parametrize("change", [elsewhere, absolute])
def test_tensors_outside_the_folder_are_refused(change: Callable[[Metadata], None], sound: Path, tmp_path: Path):
    metadata = stored(sound)
    change(metadata)
    assert_refused(hostile(sound, tmp_path, pickle.dumps(metadata)), "points to .* outside its folder")


@pytest.mark.parametrize(
    "content",
    [b"", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({"state_dict_metadata": {}}), b"\x80\x04\x95\xff."],
)
def test_bytes_that_are_no_metadata_are_one_clear_error(content: bytes, sound: Path, tmp_path: Path):
    assert_refused(hostile(sound, tmp_path, content), "is not the metadata of a checkpoint")


def test_what_is_read_equals_what_dcp_wrote(sound: Path):
    read, written = StateReader(sound / "state").read_metadata(), stored(sound)
    assert read.state_dict_metadata == written.state_dict_metadata
    assert read.storage_data == written.storage_data
