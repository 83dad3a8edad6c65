"""The checkpoints of a run as folders: written aside, verified, renamed; the newest and the best stay."""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from unirl.train.backend.manifest import damage, flush, read_manifest, write_manifest
from unirl.types.errors import ConfigError
from unirl.types.storage import open_to_umask

logger = logging.getLogger(__name__)

BEST = "best.json"

_FINISHED = re.compile(r"step-(\d+)(\.replaced-[0-9a-f]+)?")
_UNFINISHED = re.compile(r"step-\d+\.tmp-[0-9a-f]+")


class CheckpointFolder:
    """The folder `step-000123` of each checkpoint, below `path`. Knows files, not what is in them.

    One is written as `step-000123.tmp-...`, forced to the disk, read back, and renamed, so that the last good one
    survives whatever happens meanwhile. keep_last: newest checkpoints that stay. keep_best: the one of the highest
    score stays too, and `best.json` names it. Rank 0 calls the methods; all ranks write into what it has begun.
    """

    def __init__(self, path: Path, *, keep_last: int, keep_best: bool) -> None:
        if keep_last < 1:
            raise ConfigError(f"save.keep_last = {keep_last} must be at least 1")
        self.path = path
        self._keep_last = keep_last
        self._keep_best = keep_best

    def remove_unfinished(self) -> None:
        """Remove what a run that was killed while it saved has left."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(path.name):
                logger.warning("removing %s, which an interrupted run left unfinished", path)
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, temp: Path) -> None:
        """Make the folder that a checkpoint is written into; its name is of `unfinished_name`."""
        self.path.mkdir(parents=True, exist_ok=True)
        temp.mkdir()

    def finish(self, temp: Path, step: int, facts: dict[str, Any]) -> None:
        """The manifest, the check, the name, and what may go now. Raises OSError for what does not read back."""
        open_to_umask(temp)
        write_manifest(temp, facts)
        if problem := damage(temp):
            raise OSError(f"what was written does not read back: {problem}")
        final = self.path / _name(step)
        if final.exists():
            final.rename(self.path / f"{_name(step)}.replaced-{secrets.token_hex(4)}")
        temp.rename(final)
        flush(self.path)
        self._retain()

    def _retain(self) -> None:
        """Remove all but the newest and the best."""
        finished = _newest_of_each(self.path)
        best = _best(finished)
        keep = set(finished[-self._keep_last :])
        if self._keep_best and best is not None:
            keep.add(best[1])
            text = json.dumps({"step": step_of(best[1]), "score": best[0], "folder": best[1].name}) + "\n"
            aside = self.path / f"{BEST}.new"
            aside.write_text(text)
            aside.rename(self.path / BEST)
        for path in finished_in(self.path):
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)

    def chosen(self, step: int | None) -> list[str | None]:
        """[name of the newest sound checkpoint, or of that of `step`, None] or [None, what is wrong]."""
        candidates = [path for path in finished_in(self.path) if step is None or step_of(path) == step]
        wrong = []
        for path in reversed(candidates):
            problem = damage(path)
            if problem is None:
                return [path.name, None]
            logger.warning("checkpoint %s is damaged and not used: %s", path, problem)
            wrong.append(f"{path.name}: {problem}")
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        if not wrong:
            steps = ", ".join(str(step_of(path)) for path in finished_in(self.path)) or "none"
            return [None, f"there is no {what} in {self.path} (steps there: {steps})"]
        return [
            None,
            f"no {what} in {self.path} is sound: {'; '.join(wrong)}. Restore one from a copy, or start anew.",
        ]


def meant_step(folder: Path, which: str) -> int:
    """The step of the checkpoint that "newest", "best" (by held-out score) or a number means in a run's `checkpoints`
    folder. Raises ConfigError if there is none."""
    finished = _newest_of_each(folder)
    steps = list(map(step_of, finished))
    if which == "newest" and steps:
        return steps[-1]
    if which == "best" and steps:
        best = _best(finished)
        if best is None:
            raise ConfigError(
                f"no checkpoint in {folder} has a held-out score, so none is the best. Add an eval section, or take "
                "the newest (--checkpoint newest)."
            )
        return step_of(best[1])
    if which not in ("newest", "best") and not which.isdecimal():
        raise ConfigError(f"--checkpoint {which!r} must be newest, best or the number of a step.")
    if not which.isdecimal() or int(which) not in steps:
        shown = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"{folder} has no checkpoint of step {which}; it has {shown}.")
    return int(which)


def _newest_of_each(folder: Path) -> list[Path]:
    """One folder per step, oldest first: of a step that is there twice, the newer."""
    return list({step_of(path): path for path in finished_in(folder)}.values())


def _best(finished: list[Path]) -> tuple[float, Path] | None:
    """Highest score and its folder; the earlier of equals."""
    scored = [(read_manifest(path)[0].get("score"), path) for path in finished]
    known = [(score, path) for score, path in scored if score is not None]
    return max(known, key=lambda pair: pair[0], default=None)


def unfinished_name(step: int) -> str:
    """A new name for a checkpoint of `step` while it is written."""
    return f"{_name(step)}.tmp-{secrets.token_hex(4)}"


def finished_in(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first; one that was being replaced comes before its successor."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FINISHED.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), "." not in path.name, path.name))


def _name(step: int) -> str:
    return f"step-{step:06d}"


def is_finished_name(name: str) -> bool:
    """True for the name of a finished checkpoint that no other is about to replace."""
    return re.fullmatch(r"step-\d+", name) is not None


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.partition("-")[2].partition(".")[0])
