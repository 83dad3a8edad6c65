"""Ends an engine's process group. Imports only the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Set
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def shared_memory(group: int) -> set[int]:
    """Inodes of the files in shared memory that only processes of this group map."""
    ours, others = set[int](), set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since it was listed, or of another user
            (ours if os.getpgid(int(process.name)) == group else others).update(_mapped_by(process))
    return ours - others


def end_group(group: int, noted: Set[int] = frozenset()) -> None:
    """Kill all processes of a group, and remove the shared memory and semaphores that only they use. The trackers that
    would have removed them (Python's, torch's) are killed too.

    noted: result of `shared_memory` while they ran, which covers processes that have ended since.
    """
    inodes = shared_memory(group) | (noted - _mapped_by_anyone() if noted else set())
    # By inode: glibc's sem_open maps a semaphore under a temporary name.
    for file in os.scandir(_SHARED_MEMORY) if inodes else ():
        with contextlib.suppress(FileNotFoundError):
            # Files of users, such as weights that the engine maps, are readable by others or lie in a folder.
            if file.inode() in inodes and stat.S_IMODE(file.stat().st_mode) == 0o600:
                os.unlink(file.path)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _mapped_by_anyone() -> set[int]:
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= _mapped_by(process)
    return found


def _mapped_by(process: Path) -> set[int]:
    """Inodes that a process maps below /dev/shm (proc(5): the fifth field of a line)."""
    lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}
