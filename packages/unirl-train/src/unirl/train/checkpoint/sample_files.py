"""Files of samples that a checkpoint holds: those of a name are `NAME-<number>.safetensors` in a folder of the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from unirl.train.checkpoint.folder import finished_in, step_of

IN_FLIGHT = "in_flight"
"""Folder of what was in flight of an asynchronous run, and key of its state in a checkpoint."""


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of one name in a folder."""
    return sorted(folder.glob(f"{name}-*.safetensors"))


def link_files(source: Path, target: Path, names: Sequence[str]) -> None:
    """Give a new folder the files of some names: as further names of the same files, which no one changes, or as copies
    where the file system has no such names."""
    target.mkdir()
    for path in (path for name in names for path in files_of(source, name)):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)


def saved_files(checkpoints: Path, step: int, folder: str) -> Path | None:
    """The folder of samples of the newest checkpoint of `step`; None if there is no such checkpoint."""
    found = [path / folder for path in finished_in(checkpoints) if step_of(path) == step]
    return found[-1] if found else None
