"""The runs of a comparison as child processes, in folders that remember their settings.

A child has its own session, so that Ctrl-C reaches it once, through `carry_out`; it gets SIGTERM where the parent
dies. It writes its output into its folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.app.run_directory import holds_run
from unirl.tracking.keys import flat
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
SUMMARY_FILE = "summary.json"
LOG_FILE = "output.log"
POLL_S = 0.2

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b.*")

Settings = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True, eq=False)
class Run:
    """One child process to be."""

    name: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    settings: Settings
    """Decides whether a finished run in the folder is this one: the recipe, and digests of the files that it reads."""

    @property
    def label(self) -> str:
        """As messages name it."""
        return f"{self.name} seed {self.seed}"

    def summary(self) -> dict[str, Any] | None:  # Any: JSON values, see docs/reference/metrics.md
        """The summary of a finished run, None where the run is not finished or not begun."""
        try:
            summary = json.loads((self.folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return summary if summary["is_complete"] else None


@functools.cache
def digest(path: str) -> str:
    """SHA-256 of a file's or folder's content; what is no path (a hub id) stands for itself."""
    place = Path(path).expanduser()
    if not place.exists():
        return path
    total = hashlib.sha256()
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            with file.open("rb") as content:
                total.update(
                    f"{file.relative_to(place)} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode()
                )
    return total.hexdigest()


def require_own_settings(runs: Sequence[Run]) -> None:
    """Raise ConfigError naming every folder that holds another run: of other settings, or not of a comparison."""
    found = [message for run in runs if (message := _other_run(run)) is not None]
    if found:
        raise ConfigError("\n".join([*found, "Give another --output, or remove what is no longer wanted there."]))


def _other_run(run: Run) -> str | None:
    path = run.folder / SETTINGS_FILE
    if not path.is_file():
        return f"{run.folder} holds a run that is not of a comparison." if holds_run(run.folder) else None
    changed = differences(json.loads(path.read_text(encoding="utf-8")), run.settings)
    shown = "; ".join(f"{key} = {theirs}, now {ours}" for key, theirs, ours in changed[:3])
    return f"{run.folder} holds a run with other settings: {shown}." if changed else None


def carry_out(
    runs: Sequence[Run], num_jobs: int, stop: threading.Event
) -> Generator[tuple[Run, str | None], None, None]:
    """Run children, `num_jobs` at a time; yields each run as it ends, with its error.

    Where `stop` is set no further child starts, and those that run are asked to save and end. Closing the generator
    ends the children too.
    """
    waiting, running = deque(runs), dict[Run, subprocess.Popen[bytes]]()
    is_asked = False
    try:
        while running or (waiting and not stop.is_set()):
            while waiting and len(running) < num_jobs and not stop.is_set():
                run = waiting.popleft()
                logger.info("%s starts, %d behind it", run.label, len(waiting))
                running[run] = start(run)
            if stop.is_set() and not is_asked:
                is_asked = True
                for child in running.values():
                    child.terminate()
            for run, child in list(running.items()):
                status = child.poll()
                if status is not None:
                    del running[run]
                    yield run, run_error(run, status)
            time.sleep(POLL_S)
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            child.wait()


def start(run: Run) -> subprocess.Popen[bytes]:
    """Start the child of a run, with its settings and output in files of its folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / SETTINGS_FILE).write_text(json.dumps(run.settings, indent=2) + "\n", encoding="utf-8")
    with (run.folder / LOG_FILE).open("wb") as log:
        return subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_error(run: Run, status: int) -> str | None:
    """In one line why a child that ended with `status` has not finished its run; None where it has."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status == 0:
        return None if run.summary() is not None else "stopped before its budget was used up"
    lines = [line.strip() for line in (run.folder / LOG_FILE).read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if _ERROR_LINE.match(line)]
    return (named or lines or [f"ended with status {status}"])[-1]


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(dotted key, value on the left, value on the right) wherever two nested mappings differ."""
    ours, theirs = dict(flat(left)), dict(flat(right))
    return [
        (key, _shown(ours, key), _shown(theirs, key))
        for key in sorted({*ours, *theirs})
        if _shown(ours, key) != _shown(theirs, key)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"
