"""The end of an engine's processes. Imports nothing but the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def end_group(group: int) -> None:
    """Kill all processes of a group, if there are any, and remove the names of the memory and the semaphores that they
    alone share: what would have removed them (Python's own tracker, torch's) is killed with them."""
    ours, others = set[Path](), set[Path]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since it was listed, or of another user
            (ours if os.getpgid(int(process.name)) == group else others).update(_shared_by(process))
    for name in ours - others:
        name.unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _shared_by(process: Path) -> set[Path]:
    """The files that a process maps of those that lie in shared memory itself: folders there are of files that stay,
    such as a push on its way."""
    paths = {
        Path(line.split(maxsplit=5)[5]) for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line
    }
    return {path for path in paths if path.parent == _SHARED_MEMORY}
