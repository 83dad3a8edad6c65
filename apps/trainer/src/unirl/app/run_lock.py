"""One process at a time writes into a run directory.

A lock is a file `run.lock.<number>` that names its process. A hard link makes it appear whole, so that no reader sees
half of one. A process that ended without taking its lock away is recognised, and the next one takes the next number:
only one process can create it, so two that find the same dead lock cannot both win. A process that finds another live
lock besides its own withdraws.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "run.lock."
_PROCESSES = Path("/proc")
_BOOT_ID = _PROCESSES / "sys" / "kernel" / "random" / "boot_id"


class RunIsLockedError(ConfigError):
    """Another process writes into the run directory, or may."""


@dataclass(frozen=True)
class Holder:
    """The process that a lock names. Its start tells it from a later one with the same id."""

    host: str
    pid: int
    start_ticks: int
    """Clock ticks between the start of the machine and that of the process."""
    boot_id: str
    pid_namespace: str
    """Processes of another container have their own ids."""
    started: str
    """When the lock was taken, for people."""

    @property
    def is_judgeable(self) -> bool:
        """True if this process can tell if the holder lives: it is, or was, on this machine and sees the same ids."""
        own = this_process()
        if self.host != own.host:
            return False
        return self.boot_id != own.boot_id or self.pid_namespace == own.pid_namespace

    @property
    def is_alive(self) -> bool:
        """True if the holder, on this machine, still runs."""
        return self.boot_id == _boot_id() and _start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


def this_process() -> Holder:
    """The holder that this process is."""
    pid = os.getpid()
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ConfigError(f"{_PROCESSES / str(pid)} cannot be read, which a lock on run_dir needs. Mount /proc.")
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        start_ticks=ticks,
        boot_id=_boot_id(),
        pid_namespace=os.readlink(_PROCESSES / "self" / "ns" / "pid"),
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock on an existing run directory. Raises RunIsLockedError if another process does or may."""
    path = _taken(folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def lives(folder: Path) -> bool | None:
    """True if the process that writes into a run directory runs; False if none does; None where that cannot be seen
    from here, because it is on another machine or its lock cannot be read. Changes nothing."""
    answer: bool | None = False
    for path in _locks(folder):
        try:
            holder = Holder(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError):
            answer = None
            continue
        if not holder.is_judgeable:
            answer = None
        elif holder.is_alive:
            return True
    return answer


def is_lock(path: Path) -> bool:
    """True if a file is a lock, or one in the making."""
    return path.name.startswith(LOCK)


def _taken(folder: Path) -> Path:
    aside = folder / f"{LOCK}{secrets.token_hex(4)}.new"
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(this_process())) + "\n")
            file.flush()
            os.fsync(file.fileno())
        while True:
            _refuse_living(folder, before := _locks(folder))
            own = folder / f"{LOCK}{_number(before[-1]) + 1 if before else 1}"
            try:
                os.link(aside, own)
            except FileExistsError:
                continue  # another process was faster; look again at what it left
            break
    except OSError as error:
        raise ConfigError(
            f"run_dir = {folder} cannot be locked: {error.strerror}. Set run_dir to a file system with hard links."
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    others = [path for path in _locks(folder) if path != own]
    try:
        _refuse_living(folder, others)
    except ConfigError:
        own.unlink(missing_ok=True)
        raise
    for path in others:
        logger.info("%s: removing the lock of a process that has ended", path)
        path.unlink(missing_ok=True)
    return own


def _refuse_living(folder: Path, locks: list[Path]) -> None:
    for path in locks:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # given back meanwhile
        try:
            holder = Holder(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise RunIsLockedError(
                f"run_dir = {folder} has a lock that cannot be read, {path.name}. If no run writes there, remove it "
                f"(rm {path}); else choose another run_dir."
            ) from error
        if not holder.is_judgeable:
            raise RunIsLockedError(
                f"run_dir = {folder} is locked by {holder}. Whether that still runs cannot be seen from here "
                f"({socket.gethostname()}). If it has ended, remove its lock (rm {path}); else choose another run_dir."
            )
        if holder.is_alive:
            raise RunIsLockedError(
                f"run_dir = {folder} is in use by {holder}. Choose another run_dir; or stop that run first "
                f"(kill {holder.pid} saves it), then continue it with resume=auto."
            )


def _locks(folder: Path) -> list[Path]:
    """Locks by number."""
    return sorted((path for path in folder.glob(f"{LOCK}*") if path.suffix[1:].isdecimal()), key=_number)


def _number(path: Path) -> int:
    return int(path.suffix[1:])


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where it has ended (proc(5), fields 3, 22)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The second field is the name in parentheses, which may hold spaces and parentheses itself.
        fields = (
            (_PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return None if fields[0] in ("Z", "X") else int(fields[19])
    return None
