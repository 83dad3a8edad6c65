"""What exports of merged weights share: checks before anything is written, and the checkpoint's other files."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from unirl.types.errors import CheckpointError, ConfigError


def export_folder(folder: str, source: Path) -> Path:
    """The folder to write to. Raises ConfigError if it is the checkpoint `source` itself."""
    target = Path(folder)
    if target.resolve() == source.resolve():
        raise ConfigError(f"the export folder {folder} is the checkpoint that was loaded. Export elsewhere.")
    return target


def check_fits(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    owner: object,
    *,
    optional: Collection[str] = (),
    most: int | None = None,
) -> None:
    """Raise CheckpointError unless `weights` have the names and shapes of `expected`.

    owner: as the error names it. optional: names that need not be expected. most: names of a kind in the error, None
    for all.
    """
    wrong = {
        "missing": sorted(expected.keys() - weights.keys())[:most],
        "unexpected": sorted(weights.keys() - expected.keys() - set(optional))[:most],
        "shape": sorted(n for n in expected.keys() & weights.keys() if weights[n].shape != expected[n].shape)[:most],
    }
    if any(wrong.values()):
        raise CheckpointError(f"the merged state does not fit {owner}: {wrong}")


def copy_others(source: Path, target: Path, *weight_files: str) -> None:
    """Copy all of a checkpoint but its hidden files and those that match a pattern of `weight_files`."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", *weight_files))
