from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unirl.types.owned_folder import OwnedFolder

_MAKES_ONE = """
import sys, time
from unirl.types.owned_folder import OwnedFolder
folder = OwnedFolder("push-", sys.argv[1])
(folder.path / "bucket").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(60)
"""


def folder_of_another(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", _MAKES_ONE, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    process, left = folder_of_another(tmp_path)
    try:
        with_living = OwnedFolder("push-", tmp_path)
        assert (left / "bucket").exists()
    finally:
        process.kill()
        process.wait()
    other_prefix = OwnedFolder("engine-", tmp_path)
    assert (left / "bucket").exists()
    after = OwnedFolder("push-", tmp_path)
    assert not left.exists()
    assert with_living.path.is_dir() and other_prefix.path.is_dir() and after.path.is_dir()


def test_folders_of_other_hosts_and_files_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "push-another-host-abc"
    elsewhere.mkdir()
    own = OwnedFolder("push-", tmp_path)
    (host := own.path.with_name(own.path.name + "-file")).write_text("no folder", encoding="utf-8")
    OwnedFolder("push-", tmp_path)
    assert elsewhere.is_dir() and host.is_file()


def test_remove_deletes_what_is_inside_and_may_be_called_twice(tmp_path: Path) -> None:
    folder = OwnedFolder("push-", tmp_path)
    (folder.path / "bucket").write_bytes(b"weights")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []
