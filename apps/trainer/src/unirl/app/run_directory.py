"""Where a run lies, and which earlier run it continues."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unirl.app.run_lock import RunIsLockedError, is_lock, locked
from unirl.config.former_recipes import names_before
from unirl.types.errors import ConfigError

RUNS = "runs"
CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
LOG_FILE = "run.log"
SUMMARY_FILE = "summary.json"
FAILED = "failed-"
"""Begins the name of a folder in a run directory with the files of a run that failed there."""
OF_A_RUN = (
    *(CONFIG_FILE, LOG_FILE, SAMPLES, CHECKPOINTS, "metrics.jsonl", "alerts.jsonl", "timeline.jsonl"),
    *("requests.jsonl", "scale.json", "tensorboard", "wandb", "swanlab"),
)
"""What a run writes; a user's files next to it stay where they are."""

NO_CHECKPOINT = "--checkpoint is of a run; a recipe has none. Give the folder of a run."

logger = logging.getLogger(__name__)

Recipe = Mapping[str, Any]  # Any: a recipe's values


@contextmanager
def claimed_run_dir(recipe: Recipe, now: datetime.datetime) -> Generator[tuple[Path, bool]]:
    """As `choose_run_dir`, with the directory made and locked, and what a failed run left there moved into
    `failed-<number>`. Raises RunIsLockedError if another run holds it."""
    is_new = recipe.get("run_dir") is None and recipe.get("resume") is None
    with ExitStack() as stack:
        while True:
            folder, _ = choose_run_dir(recipe, now)
            make_run_dir(folder)
            try:
                stack.enter_context(locked(folder))
                break
            except RunIsLockedError:
                if not is_new:
                    raise
            # Another run of this second has it; the next choice is a folder that is not there yet.
        _consult_mirror(recipe, folder)
        # Anew, since another run may have begun and ended between the choice and the lock.
        _, is_resumed = choose_run_dir({**recipe, "run_dir": str(folder)}, now)
        if not is_resumed and holds_run(folder):
            _set_aside(folder)
        yield folder, is_resumed


def _consult_mirror(recipe: Recipe, folder: Path) -> None:
    """Fetch the newest checkpoint of `save.mirror` for a run that resumes. Raises ConfigError if one that begins would
    write over the checkpoints of another run."""
    url = (recipe.get("save") or {}).get("mirror")
    if url is None:
        return
    from unirl.train.checkpoint.mirror import Mirror  # imports torch

    mirror = Mirror(str(url))
    if recipe.get("resume") is not None:
        mirror.fetch_newest(folder / CHECKPOINTS)
    elif found := mirror.finished():
        raise ConfigError(
            f"save.mirror = {url} has checkpoints of another run, up to {found[-1]}. Set resume=auto to continue it, "
            "or choose another URL."
        )


def choose_run_dir(recipe: Recipe, now: datetime.datetime) -> tuple[Path, bool]:
    """The run directory, and whether its newest checkpoint is continued.

    `run_dir` names it; else `resume` finds one (`auto`: the newest run of this recipe with a checkpoint, also of an old
    name of it, or a new run where there is none; a path: that run); else it is runs/<recipe>/<time>. Raises ConfigError
    for a run to resume that has no checkpoint, and for a directory that already holds a run which is not to be resumed,
    unless that failed before its first checkpoint.
    """
    resume, given = recipe.get("resume"), recipe.get("run_dir")
    family = Path(RUNS) / recipe["recipe"]
    if resume not in (None, "auto"):
        folder = Path(resume).expanduser()
        if given is not None and Path(given).expanduser().absolute() != folder.absolute():
            raise ConfigError(f"resume = {resume} and run_dir = {given} name two runs. Give one of them.")
        if not has_checkpoint(folder):
            raise ConfigError(f"resume = {resume}: no checkpoint in {folder / CHECKPOINTS}. Give the folder of a run.")
        return folder, True
    if given is not None:
        folder = Path(given).expanduser()
        if resume == "auto":
            return folder, has_checkpoint(folder)
        if holds_run(folder) and not has_only_failed(folder):
            raise ConfigError(
                f"run_dir = {folder} already holds a run. Set resume=auto to continue it, or choose another run_dir."
            )
        return folder, False
    if resume == "auto":
        families = [family, *(Path(RUNS) / name for name in names_before(recipe["recipe"]))]
        earlier = [folder for each in families for folder in each.glob("*") if has_checkpoint(folder)]
        if earlier:
            return max(earlier, key=lambda folder: folder.name), True
    return _unused(family / now.strftime("%Y%m%d-%H%M%S")), False


def has_checkpoint(folder: Path) -> bool:
    """True if a finished checkpoint lies there; what a killed run was still writing (`.tmp-`) is none."""
    return any(".tmp-" not in path.name for path in (folder / CHECKPOINTS).glob("step-*"))


def require_checkpoint(run_dir: Path) -> None:
    """Raise ConfigError for a run that has saved none."""
    if not has_checkpoint(run_dir):
        raise ConfigError(f"{run_dir} holds no checkpoint. Give the folder of a run that has saved one.")


def holds_run(folder: Path) -> bool:
    """True if a run has written here more than its recipe and log, which is all that one leaves that fails to start."""
    config = folder / CONFIG_FILE
    is_run = config.exists() and any(
        path.is_file()
        and path not in (config, folder / LOG_FILE)
        and not is_lock(path)
        and not path.relative_to(folder).parts[0].startswith(FAILED)
        for path in folder.rglob("*")
    )
    return is_run or has_checkpoint(folder)


def has_only_failed(folder: Path) -> bool:
    """True if the run that wrote here came neither to a checkpoint nor to its end, so that nothing can continue it."""
    return not has_checkpoint(folder) and not (folder / SUMMARY_FILE).exists()


def _set_aside(folder: Path) -> None:
    """Move what a failed run wrote into the first `failed-<number>` that is not there yet."""
    count = 1
    while (aside := folder / f"{FAILED}{count}").exists():
        count += 1
    aside.mkdir()
    for name in OF_A_RUN:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    make_run_dir(folder)
    logger.warning("%s held a run that failed before its first checkpoint; its files are in %s", folder, aside)


def make_run_dir(folder: Path) -> None:
    """Create the directory with its samples folder. Raises ConfigError if that is impossible."""
    try:
        (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {folder} cannot be made: {error.strerror}. Set run_dir elsewhere.") from error


def make_folder(option: str, folder: Path) -> None:
    """Create a folder that results go to, before the work. Raises ConfigError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be made: {error.strerror}. Give another folder.") from error


def _unused(folder: Path) -> Path:
    candidate, count = folder, 1
    while candidate.exists():
        count += 1
        candidate = folder.with_name(f"{folder.name}-{count}")
    return candidate
