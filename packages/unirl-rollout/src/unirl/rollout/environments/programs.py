"""Programs that episodes start, found by a variable of their environment, which they inherit: libraries give them other
process groups, and they outlive the process that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path

MARK = "UNIRL_EPISODES"


def new_mark() -> str:
    """A value of MARK that no other process has."""
    return uuid.uuid4().hex


def marking(mark: str) -> list[str]:
    """What stands before a command whose process, and all that it starts, shall have this mark."""
    return ["env", f"{MARK}={mark}"]


def mark_of_this_process() -> str | None:
    """Its mark, for programs that do not inherit all variables; None without one."""
    words = Path("/proc/self/environ").read_bytes().split(b"\0")
    head = f"{MARK}=".encode()
    return next((word.removeprefix(head).decode() for word in words if word.startswith(head)), None)


def end_programs(mark: str) -> None:
    """Kill all processes with this mark but the one that calls."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
