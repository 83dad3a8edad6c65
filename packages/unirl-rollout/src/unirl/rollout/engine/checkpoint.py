"""Names and shapes that a push must have, read from the headers of the engine's own checkpoint, not from the sender."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import safe_open

from unirl.types.adapters import FACTOR_A, FACTOR_B
from unirl.types.errors import ConfigError
from unirl.types.weights import WeightSpec


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a checkpoint in the transformers layout, under today's names. A head tied to the
    embedding is left out. Raises ConfigError for a folder without safetensors files."""
    shapes = _shapes_in_files(folder)
    return {name: shapes[own] for name, own in _own_names(shapes).items()}


def checkpoint_names(folder: Path) -> dict[str, str]:
    """Tensor name of `checkpoint_shapes` -> name in the checkpoint's files, which an engine started from them
    expects."""
    return _own_names(_shapes_in_files(folder))


def part_shapes(folder: Path, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the tensors whose names begin with a key of `names`; that prefix is replaced by its
    value. Raises ConfigError for a folder without safetensors files."""
    shapes = _all_shapes(folder)
    return {own: shapes[name] for own, name in _part_names(shapes, names).items()}


def part_files(folder: Path, names: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Tensor name of `part_shapes`, or of `checkpoint_shapes` for None -> its file, and its name in that."""
    stored = _stored(folder)
    chosen = _own_names(stored) if names is None else _part_names(stored, names)
    return {own: (str(stored[name][0]), name) for own, name in chosen.items()}


def _shapes_in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = _all_shapes(folder)
    if _is_tied(folder):
        shapes.pop("lm_head.weight", None)
    return shapes


def _all_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in _stored(folder).items()}


def _stored(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Tensor name -> its file and shape."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"the model folder {folder} has no safetensors files; save it with save_pretrained")
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                stored[name] = file, tuple(opened.get_slice(name).get_shape())
    return stored


def _part_names(names: Collection[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Name under the prefixes of a push -> name in the files."""
    return {
        renamed + name.removeprefix(begin): name
        for name in names
        for begin, renamed in parts.items()
        if name.startswith(begin)
    }


_THINKER = "thinker."
"""Begins the names of the part of a whole Qwen3-Omni that writes; the other parts speak."""


def _own_names(names: Collection[str]) -> dict[str, str]:
    if any(name.startswith(_THINKER) for name in names):
        return {name.removeprefix(_THINKER): name for name in names if name.startswith(_THINKER)}
    is_old_vision = any(name.startswith("visual.") for name in names)
    return {present_name(name) if is_old_vision else name: name for name in names}


def local_folder(model: str) -> Path:
    """Local folder of a model, without network access: `model` itself, or the cached files of a hub id. The caller
    checks that it exists."""
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1:
        try:
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
        except ImportError as error:
            raise ImportError("hub ids need huggingface-hub: pip install 'unirl-rollout[sglang]'") from error
        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            folder = Path(snapshot_download(model, local_files_only=True))
    return folder.absolute()


def present_name(name: str) -> str:
    """Today's transformers name of a Qwen2-VL or Qwen2.5-VL parameter; checkpoints keep the names used before 4.52."""
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))


def full_specs(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[WeightSpec]:
    """What a push of the whole model must announce, without checksums."""
    return [WeightSpec(name, shape, dtype, "") for name, shape in shapes.items()]


def adapter_specs(names: list[str], shapes: Mapping[str, tuple[int, ...]], dtype: str, rank: int) -> list[WeightSpec]:
    """Expected specs of the LoRA factors in `names`: A [r, in] and B [out, r] of each layer of the model.

    If one factor of a layer is named, both are expected. Names that match no layer are left out, so that the comparison
    reports them.
    """
    layers = {name.removesuffix(suffix) for name in names for suffix in (FACTOR_A, FACTOR_B) if name.endswith(suffix)}
    specs = []
    for layer in sorted(layers):
        shape = shapes.get(f"{layer}.weight")
        if shape is None or len(shape) != 2:
            continue
        specs += [
            WeightSpec(layer + FACTOR_A, (rank, shape[1]), dtype, ""),
            WeightSpec(layer + FACTOR_B, (shape[0], rank), dtype, ""),
        ]
    return specs
