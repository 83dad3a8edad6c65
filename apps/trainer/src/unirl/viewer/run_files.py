"""Where runs lie below a folder, and what their small files say. Nothing here writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unirl.app.run_directory import CHECKPOINTS, CONFIG_FILE, LOG_FILE, SAMPLES
from unirl.app.run_lock import lives
from unirl.types.errors import ConfigError, DataError

METRICS, ALERTS, SUMMARY, REQUESTS = "metrics.jsonl", "alerts.jsonl", "summary.json", "requests.jsonl"
TIMELINE = "timeline.jsonl"
WATCHED = (METRICS, ALERTS, SUMMARY, REQUESTS, TIMELINE, LOG_FILE, CONFIG_FILE, SAMPLES, CHECKPOINTS)
"""Files and folders whose change is a change of the run."""
MAX_DEPTH = 6
"""Folders below the one that is viewed; runs/<recipe>/<time> is four at most, a comparison adds two."""
MAX_SMALL_BYTES = 8 << 20
"""Largest file that is read whole, such as a recipe or a summary."""


class NotFoundError(DataError):
    """A run, or a file of one, that is not there."""


@dataclass(frozen=True)
class RunFolder:
    """A run directory below the folder that is viewed."""

    name: str
    """Path from the viewed folder, with slashes; "." where this is the run itself."""
    path: Path

    def file(self, name: str) -> Path:
        """A file of the run. Raises NotFoundError for one that is not there, or that leads out of the run directory,
        links followed."""
        path = (self.path / name).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise NotFoundError(f"{name!r} is not within the run directory {self.name}.")
        if not path.is_file():
            raise NotFoundError(f"{self.name} has no file {name!r}.")
        return path

    def text(self, name: str) -> str | None:
        """Content of a small text file; None where it is not there (yet). Raises DataError for one that is large."""
        try:
            path = self.file(name)
            if path.stat().st_size > MAX_SMALL_BYTES:
                raise DataError(f"{self.name}/{name} has more than {MAX_SMALL_BYTES >> 20} MB and is not read.")
            return path.read_text(encoding="utf-8", errors="replace")
        except (NotFoundError, FileNotFoundError):
            return None

    def mapping(self, name: str) -> Mapping[str, Any] | None:  # Any: JSON values
        """Content of a JSON file; None where it is not there, or half written."""
        try:
            value = json.loads(self.text(name) or "null")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def recipe(self) -> Mapping[str, Any]:  # Any: values of a recipe
        """The recipe as its file has it; empty where that is not there or no mapping."""
        try:
            value = yaml.load(self.text(CONFIG_FILE) or "", Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            return {}
        return value if isinstance(value, dict) else {}

    def is_running(self) -> bool | None:
        """True if the process that writes here lives; None where another machine's cannot be judged."""
        return lives(self.path)

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """(name, size, time) of what is watched and present."""
        found = []
        for name in WATCHED:
            try:
                stat = (self.path / name).stat()
            except OSError:
                continue
            found.append((name, stat.st_size, stat.st_mtime_ns))
        return tuple(found)


class RunsFolder:
    """The folder that is viewed. Raises ConfigError if it is not there."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "is no folder" if path.exists() else "is not there"
            raise ConfigError(f"FOLDER = {path} {what}. Give the folder of a run, or one that runs lie below.")
        self.path = path.resolve()

    def runs(self) -> list[RunFolder]:
        """All runs, by name, without those that a link elsewhere leads to."""
        if is_run(self.path):
            return [RunFolder(".", self.path)]
        found = [RunFolder(path.relative_to(self.path).as_posix(), path) for path in _below(self.path, MAX_DEPTH)]
        own = [run for run in found if not run.path.is_symlink() or run.path.resolve().is_relative_to(self.path)]
        return sorted(own, key=lambda run: run.name)

    def run(self, name: str) -> RunFolder:
        """The run of a name. Raises NotFoundError if there is none, or the name leads out of the folder."""
        path = (self.path / name).resolve()
        if not path.is_relative_to(self.path):
            raise NotFoundError(f"{name!r} is not within {self.path}.")
        if not path.is_dir() or not is_run(path):
            raise NotFoundError(f"{name!r} is no run directory: it has neither {CONFIG_FILE} nor {METRICS}.")
        return RunFolder(name, path)


def is_run(path: Path) -> bool:
    """True if a run writes or has written there."""
    return (path / METRICS).is_file() or (path / CONFIG_FILE).is_file()


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return  # removed meanwhile, or not readable: no runs to show
    for entry in entries:
        path = Path(entry.path)
        if is_run(path):
            yield path
        elif depth > 1 and not entry.is_symlink():
            yield from _below(path, depth - 1)
