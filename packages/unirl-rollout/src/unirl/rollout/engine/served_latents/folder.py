"""Finds which pipeline a checkpoint folder holds, and checks that an engine supports it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from unirl.types.errors import ConfigError

INDEX_FILE = "model_index.json"
CONFIG_FILE = "config.json"
"""Configuration file of a model that is a single module and has no index."""
REPLICA = "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine"


def served_class(folder: Path, served: Collection[str], engine: str) -> str:
    """The pipeline class in a folder's index, or the model type if the folder holds a single module. Raises ConfigError
    if it is not in `served`, the folder holds neither, or there are two transformers."""
    is_pipeline = (folder / INDEX_FILE).is_file() or not (folder / CONFIG_FILE).is_file()
    file, key = (INDEX_FILE, "_class_name") if is_pipeline else (CONFIG_FILE, "model_type")
    try:
        name = json.loads((folder / file).read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine.model = {str(folder)!r} is no folder of a diffusers pipeline ({error}). Give the folder that the "
            f"bundle loads, which has a {INDEX_FILE} or, of a unified model, a {CONFIG_FILE}."
        ) from error
    if name not in served:
        raise ConfigError(
            f"{folder} holds a {name}; the {engine} engine serves {', '.join(served)}. Sample with {REPLICA}, which "
            "serves every family."
        )
    if (folder / "transformer_2").is_dir():
        raise ConfigError(
            f"{folder} has two transformers; the {engine} engine serves checkpoints of one. Sample with {REPLICA}."
        )
    return name
