"""Folders of pretrained models: found, checked and described before any weight is read.

A diffusers pipeline folder holds `model_index.json` and one subfolder per component, one of a pipeline of blocks
`modular_model_index.json` instead, and a transformers model folder `config.json` next to its weights. A hub id
("owner/name") is downloaded into the hub's cache first, its index or configuration alone before the weights, so that a
wrong id or class costs nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unirl.models.extras import from_extra
from unirl.models.installed import (
    MODULAR_INDEX,
    wrong_component,
    wrong_model,
    wrong_modular_pipeline,
    wrong_pipeline,
)
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.hub import is_hub_id

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

logger = logging.getLogger(__name__)

INDEX_FILE = "model_index.json"
CONFIG_FILE = "config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class PipelineFolder:
    """A local folder whose index has been read."""

    path: Path
    index: dict[str, Any]  # Any: JSON values, told apart key by key
    """Content of its index: component -> [library, class], plus "_class_name" and settings. In that of a pipeline of
    blocks a third element says whence a component is loaded, and has the class under "type_hint" if it is not loaded
    yet."""
    file: str = INDEX_FILE
    """Name of the index."""

    def class_of(self, component: str) -> str | None:
        """Class name of a component, or None where the pipeline has none."""
        match self.index.get(component):
            case [_, name]:
                return name
            case [_, name, {"type_hint": [_, hint]}]:
                return name or hint
        return None

    @property
    def components(self) -> list[str]:
        """Names of the components that the pipeline has, each a subfolder."""
        return [name for name in self.index if self.class_of(name) is not None]

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:  # Any: JSON values
        """A JSON file of a component. Raises CheckpointError if it is missing or not JSON."""
        return _read_json(self.path / component / file, f"component {component!r}")

    def require(self, component: str, class_names: Sequence[str], *, needs_weights: bool = True) -> None:
        """Checks a component with weights: its class, its config and, if they are needed, that a weight file is there.

        Raises CheckpointError or ConfigError naming the path, what is missing and what to do.
        """
        found = self.class_of(component)
        if found is None:
            raise CheckpointError(
                f"{self.path / self.file} lists no component {component!r} (it has {self.components}). "
                f"Use a complete pipeline folder, with {component}/ of class {' or '.join(class_names)}."
            )
        if found not in class_names:
            raise ConfigError(wrong_component(str(self.path), component, found, class_names))
        self.config(component)
        if not needs_weights:
            return
        folder = self.path / component
        weights = [file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES]
        if not weights:
            raise CheckpointError(
                f"{folder} holds no weights (*.safetensors); it has {sorted(file.name for file in folder.iterdir())}. "
                "The download or copy is incomplete: fetch the folder again."
            )


def open_pipeline_folder(
    pretrained_model: str,
    pipeline_classes: Sequence[str],
    *,
    index_file: str = INDEX_FILE,
    unread: Collection[str] = (),
) -> PipelineFolder:
    """The pipeline of a local folder or hub id, checked to be one of `pipeline_classes`. Reads no weights.

    index_file: `MODULAR_INDEX` for a pipeline of blocks. unread: components that are not downloaded.
    Raises CheckpointError if there is no such folder or no index in it, ConfigError for another pipeline class.
    """
    path = Path(pretrained_model).expanduser()
    is_on_hub = not path.exists() and is_hub_id(pretrained_model)
    if is_on_hub:
        path = _download(pretrained_model, [index_file])
    if not path.is_dir():
        raise CheckpointError(
            f"PRETRAINED_MODEL = {pretrained_model!r} is {'a file' if path.is_file() else 'not there'}. "
            f"Give the folder that holds {index_file}, or a hub id such as owner/name."
        )
    file = index_file
    if not (path / file).is_file():
        others = [other for other in (INDEX_FILE, MODULAR_INDEX) if (path / other).is_file()]
        if not others:
            raise CheckpointError(
                f"{path} is not a diffusers pipeline folder: it has no {index_file}, only "
                f"{sorted(entry.name for entry in path.iterdir())[:8]}. Give the folder that save_pretrained wrote, "
                "not one of its components and not a single-file checkpoint."
            )
        [file] = others
    index = _read_json(path / file, "the pipeline")
    name = index.get("_class_name")
    if file != index_file or name not in pipeline_classes:
        wrong = wrong_modular_pipeline if file == MODULAR_INDEX else wrong_pipeline
        raise ConfigError(wrong(str(path), name, pipeline_classes))
    folder = PipelineFolder(path=path, index=index, file=file)
    if is_on_hub:
        patterns = [f"{name}/*" for name in folder.components if name not in unread]
        _download(pretrained_model, [file, *patterns])
    return folder


@dataclass(frozen=True)
class ModelFolder:
    """A local folder of one transformers model, whose configuration has been read."""

    path: Path
    config: dict[str, Any]  # Any: JSON values
    """Content of `config.json`."""

    def json(self, file: str) -> dict[str, Any]:  # Any: JSON values
        """Another JSON file of the folder. Raises CheckpointError if it is missing or not JSON."""
        return _read_json(self.path / file, "the model")


def open_model_folder(
    pretrained_model: str, model_types: Sequence[str] | None, *, needs_weights: bool = True
) -> ModelFolder:
    """The model of a local folder or hub id, checked to be of one of `model_types`. Reads no weights.

    model_types: empty takes any that transformers has; None takes any, of a format that is not transformers'.

    Raises CheckpointError if there is no such folder, no configuration or no weights in it, ConfigError for another
    type.
    """
    path = Path(pretrained_model).expanduser()
    is_on_hub = not path.exists() and is_hub_id(pretrained_model)
    if is_on_hub:
        path = _download(pretrained_model, [CONFIG_FILE])
    if not path.is_dir() or not (path / CONFIG_FILE).is_file():
        state = "is a file" if path.is_file() else f"has no {CONFIG_FILE}" if path.is_dir() else "is not there"
        raise CheckpointError(
            f"PRETRAINED_MODEL = {pretrained_model!r} {state}. Give the folder that save_pretrained wrote, or a hub id "
            "such as owner/name."
        )
    config = _read_json(path / CONFIG_FILE, "the model")
    problem = None if model_types is None else wrong_model(str(path), config.get("model_type"), model_types)
    if problem is not None:
        raise ConfigError(problem)
    if is_on_hub:
        _download(pretrained_model, ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"])
    if needs_weights and not any(file.suffix in WEIGHT_SUFFIXES for file in path.iterdir()):
        raise CheckpointError(
            f"{path} holds no weights (*.safetensors); it has {sorted(file.name for file in path.iterdir())[:8]}. "
            "The download or copy is incomplete: fetch the folder again."
        )
    return ModelFolder(path=path, config=config)


def fields_of(cls: type[T], raw: Mapping[str, Any], **given: Any) -> T:  # Any: JSON values
    """A dataclass whose fields a configuration has by their names, all but those that are given. Raises KeyError for
    one that it lacks."""
    return cls(**{field.name: raw[field.name] for field in fields(cls) if field.name not in given}, **given)


def _read_json(path: Path, what: str) -> dict[str, Any]:  # Any: JSON values
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {what} is incomplete. Fetch the folder again.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Fetch the folder again.") from error


def _download(hub_id: str, patterns: list[str]) -> Path:
    with from_extra("diffusers"):
        from huggingface_hub import snapshot_download
    logger.info("fetching %s of %s", patterns, hub_id)
    try:
        # Precision variants ("model.fp16.safetensors") would double the download and are never loaded.
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*.fp16*", "*.bf16*"]))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"PRETRAINED_MODEL = {hub_id!r} is no local folder and could not be fetched as a hub id: {why}. "
            "Check the name, the network and the access token, or give a local folder."
        ) from error
