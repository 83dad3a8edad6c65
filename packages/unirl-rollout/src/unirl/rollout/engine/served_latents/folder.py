"""Which pipeline a checkpoint folder holds, and whether an engine serves it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from unirl.types.errors import ConfigError

INDEX_FILE = "model_index.json"
REPLICA = "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine"


def served_class(folder: Path, served: Collection[str], engine: str) -> str:
    """The pipeline class that a folder's index names. Raises ConfigError where it is not among `served`, and for a
    folder that is no pipeline."""
    try:
        name = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine.model = {str(folder)!r} is no folder of a diffusers pipeline ({error}). Give the folder that the "
            f"bundle loads, which has a {INDEX_FILE}."
        ) from error
    if name not in served:
        raise ConfigError(
            f"{folder} holds a {name}; the {engine} engine serves {', '.join(served)}. Sample with {REPLICA}, which "
            "serves every family."
        )
    return name
