"""Temporary folders that a killed process leaves to the next one to remove."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


class OwnedFolder:
    """A new folder in `parent`, locked (flock) until `remove` or until this process ends, however it ends.

    Making one removes the folders with the same prefix whose owner on this host has ended.

    Attributes:
        path: the folder.
    """

    def __init__(self, prefix: str, parent: Path | str) -> None:
        # File systems that hosts share may grant a lock that another host holds: each host looks at its own folders.
        prefix = f"{prefix}{socket.gethostname()}-"
        for path in Path(parent).glob(f"{prefix}*"):
            _remove_if_ended(path)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            lock = _locked(self.path)
            if lock is not None:
                break  # else another process took it for one whose owner has ended, before it was locked
        self._lock: int | None = lock

    def remove(self) -> None:
        """Delete the folder and what is in it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_if_ended(path: Path) -> None:
    lock = _locked(path)
    if lock is not None:
        try:
            logger.info("%s: removing what a process that has ended left", path)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another process has it, or the folder is gone."""
    descriptor = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError, BlockingIOError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            return descriptor
    if descriptor is not None:
        os.close(descriptor)
    return None
