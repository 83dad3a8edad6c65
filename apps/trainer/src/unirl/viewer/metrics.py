"""Metrics of runs in memory: read once, then by what is appended."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from unirl.viewer.curves import Curve

SLICE_BYTES = 1 << 20
PREVIEW_LINES = 100
"""Lines that stand for a file which is not read yet."""
MOST_RUNS = 200
"""Runs whose metrics stay in memory, some 5 MB for 10,000 steps."""
_GUARD_BYTES = 64
_LINE = msgspec.json.Decoder(dict[str, float | str | None])


@dataclass
class Column:
    """One metric: the steps that have it, and its values."""

    steps: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def curve(self) -> Curve:
        """Copies, so that reading may go on."""
        return np.array(self.steps), np.array(self.values)


class MetricsFile:
    """The metrics of one run. Not for several threads at once.

    A file that was written anew (a run that resumes drops what is past its checkpoint) is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, Column] = {}
        self.last: dict[str, float | str | None] = {}
        """The newest line."""
        self.num_bad_lines = 0
        self._offset = 0
        self._guard = b""
        """The last bytes before the offset; others there mean another file."""

    @property
    def num_unread(self) -> int:
        """Bytes that the file has and that are not read."""
        try:
            return self._path.stat().st_size - self._offset
        except FileNotFoundError:
            return 0

    def read_on(self, most_bytes: int = SLICE_BYTES) -> bool:
        """Read up to so many bytes further; True if all whole lines are read. A last line without its end is left for
        later. A file that is not there has no lines."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, self._offset - len(self._guard)))
                if size < self._offset or file.read(len(self._guard)) != self._guard:
                    self._forget()
                    file.seek(0)
                read = file.read(most_bytes)
        except FileNotFoundError:
            self._forget()
            return True
        whole = read[: read.rfind(b"\n") + 1]
        if not whole and len(read) == most_bytes:
            return self.read_on(most_bytes * 2)  # one line is longer
        self._take(whole)
        self._offset += len(whole)
        self._guard = (self._guard + whole)[-_GUARD_BYTES:]
        return self._offset + len(read) - len(whole) >= size

    def _take(self, lines: bytes) -> None:
        columns = self.columns
        for line in lines.splitlines():
            row = parsed(line)
            if row is None:
                self.num_bad_lines += bool(line.strip())
                continue
            step = int(row["step"])  # ty: ignore[invalid-argument-type] - `parsed` has looked
            for name, value in row.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = Column()
                column.steps.append(step)
                column.values.append(value if type(value) is float else _number(value))
            self.last = row


def parsed(line: bytes) -> dict[str, float | str | None] | None:
    """A line of metrics; None for what is none."""
    try:
        row = _LINE.decode(line)
    except msgspec.MsgspecError:
        return None
    step = row.get("step")
    return row if isinstance(step, (int, float)) and abs(step) < 2**31 else None


def preview(path: Path, num_lines: int = PREVIEW_LINES) -> dict[str, Column]:
    """Lines spread evenly over a file, the last among them: its curves, coarsely, at no more cost for a long file."""
    found = MetricsFile(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            tail = size - len(last_line(path) or b"") - 1
            seen = -1
            for number in range(num_lines):
                at = tail * number // num_lines
                if at <= seen:
                    continue
                file.seek(at)
                if at:
                    file.readline()  # the rest of a line
                line = file.readline()
                seen = file.tell() - 1
                if line.endswith(b"\n"):
                    found._take(line)
    except FileNotFoundError:
        return {}
    if line := last_line(path):
        found._take(line)
    return found.columns


def last_line(path: Path) -> bytes | None:
    """The last whole line; None where there is none, or the file is not there."""
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, 1 << 14
            while True:
                file.seek(max(0, size - length))
                lines = file.read(length).rpartition(b"\n")[0]
                if b"\n" in lines or length >= size:
                    return lines.rpartition(b"\n")[2] or None
                length *= 4
    except FileNotFoundError:
        return None


def first_line(path: Path) -> bytes | None:
    """The first whole line; None where there is none."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 24)
    except FileNotFoundError:
        return None
    return line.rstrip(b"\n") if line.endswith(b"\n") else None


def _number(value: float | str | None) -> float:
    try:
        return float("nan") if value is None else float(value)
    except ValueError:
        return float("nan")


class MetricsCache:
    """Metrics of the runs that were asked for last. `read_on` is called in a thread, one at a time."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most
        self._files: dict[Path, MetricsFile] = {}
        """By when they were asked for, the last one last."""
        self._unread: list[Path] = []
        self._previews: dict[Path, tuple[int, dict[str, Column]]] = {}

    def columns(self, path: Path) -> tuple[dict[str, Column], bool]:
        """All metrics of a run, and whether they are whole; a preview while the file is being read (`read_on`)."""
        file = self._files[path] = self._files.pop(path, None) or MetricsFile(path)
        for old in [known for known in self._files if known not in self._unread][
            : max(0, len(self._files) - self._most)
        ]:
            del self._files[old]
        if path not in self._unread and file.num_unread <= SLICE_BYTES and file.read_on():
            self._previews.pop(path, None)
            return file.columns, True
        if path not in self._unread:
            self._unread.append(path)
        if path not in self._previews:
            self._previews[path] = (0, preview(path))
        return self._previews[path][1], False

    def read_on(self) -> bool:
        """Read a slice of what is not read yet; True if something is left."""
        if not self._unread:
            return False
        path = self._unread[0]
        if self._files[path].read_on():
            self._unread.pop(0)
        return bool(self._unread)
