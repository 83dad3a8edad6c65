"""Sizes of pools that are asked for while a run trains: a file in its directory, read between rollouts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from unirl.types.errors import ConfigError

SCALE_FILE = "scale.json"
"""Pool -> members, until the trainer has read it."""


def ask_for_sizes(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Leave a request for the run in this directory, which replaces one that it has not read yet."""
    written = run_dir / f"{SCALE_FILE}.new"
    written.write_text(json.dumps(dict(sizes)) + "\n", encoding="utf-8")
    os.replace(written, run_dir / SCALE_FILE)


def take_sizes(run_dir: Path) -> dict[str, int]:
    """The sizes that were asked for since the last call, and no more from now on. Raises ConfigError for a file that is
    no such request."""
    path = run_dir / SCALE_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    path.unlink()
    try:
        sizes = json.loads(text)
    except ValueError:
        sizes = None
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise ConfigError(f"{path} asks for no sizes of pools: {text[:200]!r}. Write it with `trainer scale`.")
    return sizes
