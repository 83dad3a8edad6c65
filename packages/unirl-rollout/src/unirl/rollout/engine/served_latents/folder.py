"""Finds which pipeline a checkpoint folder holds, and checks that an engine supports it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from unirl.rollout.engine.checkpoint import checkpoint_shapes, part_files
from unirl.types.errors import ConfigError
from unirl.types.weights import qualified

INDEX_FILE = "model_index.json"
CONFIG_FILE = "config.json"
"""Configuration file of a model that is a single module and has no index."""
TRANSFORMER, SECOND_EXPERT = "transformer", "transformer_2"
"""Names of denoising components and of their folders."""
WITH_TWO_EXPERTS = ("WanPipeline", "WanImageToVideoPipeline")
"""Pipeline classes that are served with a second expert, too."""
REPLICA = "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine"


def served_class(folder: Path, served: Collection[str], engine: str) -> str:
    """The pipeline class in a folder's index, or the model type if the folder holds a single module. Raises ConfigError
    if it is not in `served`, the folder holds neither, or there are two transformers of which one is served."""
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
    if len(transformers(folder)) > 1 and name not in WITH_TWO_EXPERTS:
        raise ConfigError(
            f"{folder} has two transformers; the {engine} engine serves a {name} of one. Sample with {REPLICA}."
        )
    return name


def transformers(folder: Path) -> tuple[str, ...]:
    """The denoising components of a pipeline folder: one, or two experts that share the noise levels (Wan 2.2)."""
    return (TRANSFORMER, SECOND_EXPERT) if (folder / SECOND_EXPERT).is_dir() else (TRANSFORMER,)


def boundary_of(folder: Path) -> float | None:
    """Noise level below which the second expert takes over, as SGLang and vLLM-Omni read it; None for one transformer.
    Raises ConfigError if the folder has two and names none."""
    if len(transformers(folder)) == 1:
        return None
    boundary = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")).get("boundary_ratio")
    if boundary is None:
        raise ConfigError(f"{folder} has two transformers and no boundary_ratio in its {INDEX_FILE}. Add it there.")
    return float(boundary)


def linked(folder: Path, scratch: Path, file: str, changed: Mapping[str, object]) -> Path:
    """A folder of links to another one's files, of which the JSON file `file` has some other values."""
    links = scratch / "model"
    links.mkdir()
    for each in folder.iterdir():
        if each.name != file:
            (links / each.name).symlink_to(each)
    said = json.loads((folder / file).read_text(encoding="utf-8"))
    (links / file).write_text(json.dumps({**said, **changed}), encoding="utf-8")
    return links


def pushed_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of what a push to a pipeline folder's transformers must have."""
    return qualified({name: checkpoint_shapes(folder / name) for name in transformers(folder)})


def pushed_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Tensor name of `pushed_shapes` -> its file, and its name in that."""
    return qualified({name: part_files(folder / name, None) for name in transformers(folder)})
