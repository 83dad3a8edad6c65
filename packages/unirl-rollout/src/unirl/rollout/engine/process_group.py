"""The end of an engine's processes. Imports nothing but the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Set
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def shared_memory(group: int) -> set[int]:
    """The files in shared memory, by inode, that processes of a group map and no other process does."""
    ours, others = set[int](), set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since it was listed, or of another user
            (ours if os.getpgid(int(process.name)) == group else others).update(_mapped_by(process))
    return ours - others


def end_group(group: int, noted: Set[int] = frozenset()) -> None:
    """Kill all processes of a group, if there are any, and remove the memory and the semaphores that they alone share:
    what would have removed them (Python's own tracker, torch's) is killed with them.

    noted: what `shared_memory` found while they ran, which tells of those that have ended since.
    """
    inodes = shared_memory(group) | (noted - _mapped_by_anyone() if noted else set())
    # By inode: a semaphore is mapped under a name that it has only until it has its own (glibc's sem_open).
    for file in os.scandir(_SHARED_MEMORY) if inodes else ():
        with contextlib.suppress(FileNotFoundError):
            # What a user keeps there, such as weights that the engine maps, is readable by others or lies in a folder.
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
    """Inodes of what a process maps below /dev/shm (proc(5): the fifth field of a line)."""
    lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}
