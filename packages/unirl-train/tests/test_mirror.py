"""Copies of checkpoints on another file system: what is finished there, what is damaged, what fails meanwhile."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from test_checkpoint import assert_equal_states, saved_run, start
from train_fakes import snapshot

from unirl.train.backend.manifest import MANIFEST
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.checkpoint.folder import finished_in
from unirl.train.checkpoint.mirror import Copying, Mirror
from unirl.train.checkpoint.stores import MissingLibraryError, store_of
from unirl.types.errors import CheckpointError, ConfigError


@pytest.fixture
def url(tmp_path: Path):
    """A store of objects in memory."""
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").store.clear()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_from_the_mirror_with_the_same_bits(tmp_path: Path, url: str):
    backend, _, checkpointer = saved_run(tmp_path / "first", 3, mirror=url)
    checkpointer.wait()
    mirror = Mirror(url)
    assert mirror.finished() == [path.name for path in finished_in(tmp_path / "first")]
    own = files(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    fetched = mirror.fetch_newest(tmp_path / "second")
    assert fetched is not None and fetched.parent == tmp_path / "second"
    assert files(fetched) == {
        name.partition("/")[2]: data for name, data in own.items() if name.startswith(fetched.name)
    }
    other, _ = start({})
    Checkpointer(other, str(tmp_path / "second")).load()
    assert_equal_states(snapshot(other), snapshot(backend))
    assert mirror.fetch_newest(tmp_path / "second") is None  # as new


def test_a_checkpoint_that_is_half_copied_is_none(tmp_path: Path, url: str):
    saved_run(tmp_path / "run", 2)
    older, newer = finished_in(tmp_path / "run")
    mirror = Mirror(url)
    mirror.put(older)
    mirror.put(newer)
    store, root = store_of(url)
    store.rm_file(f"{root}/{newer.name}/{MANIFEST}")
    assert mirror.finished() == [older.name]
    mirror.put(newer)
    assert mirror.finished() == [older.name, newer.name]
    mirror.keep({newer.name})
    assert mirror.finished() == [newer.name] and not store.exists(f"{root}/{older.name}")


def test_a_damaged_copy_is_named_and_the_one_before_is_fetched(tmp_path: Path, url: str, caplog: Any):
    saved_run(tmp_path / "run", 2)
    older, newer = finished_in(tmp_path / "run")
    mirror = Mirror(url)
    for path in (older, newer):
        mirror.put(path)
    store, root = store_of(url)
    store.pipe_file(f"{root}/{newer.name}/driver_state.json", b"{}")
    fetched = mirror.fetch_newest(tmp_path / "other")
    assert fetched is not None and fetched.name == older.name and "driver_state.json has 2 bytes" in caplog.text
    store.rm_file(f"{root}/{older.name}/architecture.json")
    with pytest.raises(CheckpointError, match=r"is sound: .*driver_state.json.*architecture.json is missing"):
        mirror.fetch_newest(tmp_path / "third")
    assert finished_in(tmp_path / "third") == [] and list((tmp_path / "third").iterdir()) == []


class Flaky:
    """A store whose copies fail while `is_down`."""

    def __init__(self, store: Any) -> None:
        self._store, self.is_down = store, True

    def __getattr__(self, name: str) -> Any:
        if name == "put_file" and self.is_down:
            raise ConnectionError("no route to the store")
        return getattr(self._store, name)


def test_what_could_not_be_copied_is_said_and_copied_with_the_next(tmp_path: Path, url: str, caplog: Any):
    saved_run(tmp_path / "run", 2)
    mirror = Mirror(url)
    flaky = mirror._store = Flaky(mirror._store)
    copying = Copying(mirror, tmp_path / "run")
    copying.begin()
    with pytest.raises(CheckpointError, match=r"are whole, but memory://.* lacks some: ConnectionError: no route"):
        copying.wait()
    assert "has no copy of the newest checkpoint yet" in caplog.text
    flaky.is_down = False
    copying.begin()
    copying.wait()
    copying.wait()
    assert mirror.finished() == [path.name for path in finished_in(tmp_path / "run")]


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_former(tmp_path: Path, url: str):
    saved_run(tmp_path / "run", 1)
    (path,) = finished_in(tmp_path / "run")
    mirror = Mirror(url)
    mirror.put(path)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest))  # other bytes
    (path / "rng-00000.safetensors").unlink()
    mirror.put(path)
    store, root = store_of(url)
    found = {Path(name).name for name in store.find(f"{root}/{path.name}")}
    assert "rng-00000.safetensors" not in found and MANIFEST in found


def test_a_checkpoint_that_went_before_it_was_copied_is_no_failure(tmp_path: Path, url: str, monkeypatch: Any):
    saved_run(tmp_path / "run", 2)
    older, newer = finished_in(tmp_path / "run")
    mirror = Mirror(url)
    put = mirror.put

    def losing(path: Path) -> None:
        if path == older:
            shutil.rmtree(older)
        put(path)

    monkeypatch.setattr(mirror, "put", losing)
    # Stores of objects have no folders that could be empty.
    monkeypatch.setattr(mirror._store, "makedirs", lambda path, exist_ok: None)
    copying = Copying(mirror, tmp_path / "run")
    copying.begin()
    copying.wait()
    assert mirror.finished() == [newer.name]


def test_kinds_of_urls_that_cannot_be_used_say_why():
    with pytest.raises(ConfigError, match=r"save.mirror = nothing://a cannot be used: Protocol not known: nothing"):
        Mirror("nothing://a")
    with pytest.raises(MissingLibraryError, match=r"save.mirror = s3://a/b needs a library: Install s3fs"):
        Mirror("s3://a/b")
