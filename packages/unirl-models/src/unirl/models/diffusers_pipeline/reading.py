"""Reads the components of a pipeline folder: models whole or tensor by tensor, tokenizers and image processors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from unirl.models.diffusers_pipeline.construction import from_configuration
from unirl.models.extras import from_extra
from unirl.models.loading import PipelineFolder
from unirl.models.stored import Source, TensorFiles, check_state, file_tensors, safetensors_files, size_problem
from unirl.types.errors import CheckpointError

with from_extra("diffusers"):
    import transformers
    from diffusers.models.modeling_utils import ModelMixin

logger = logging.getLogger(__name__)

_WEIGHTS = "diffusion_pytorch_model"
"""Beginning of the names of weight files."""


def can_defer(folder: PipelineFolder, trained: Sequence[str]) -> bool:
    """True if all components that train can be read in parts. Logs what cannot."""
    for name in trained:
        path = folder.path / name
        is_in_parts = any((path / f"{_WEIGHTS}{end}").is_file() for end in (".safetensors", ".safetensors.index.json"))
        if not is_in_parts or "quantization_config" in folder.config(name):
            reason = "its weights are quantised" if is_in_parts else f"it has no {_WEIGHTS}.safetensors"
            logger.warning("every rank reads all of %s: %s", path, reason)
            return False
    return True


def stored_tensors(module: nn.Module, path: Path) -> dict[str, Source]:
    """Where each weight of a diffusers model is in its folder. Raises CheckpointError for weights that do not fit."""
    files = TensorFiles(safetensors_files(path, _WEIGHTS) or {})
    found = file_tensors(module, files)
    check_state(module, found, path, unread=files.files.keys() - found.keys())
    return found


def read_model(
    path: Path, model_class: type[Any], dtype: torch.dtype, device: torch.device
) -> Any:  # Any: a model of diffusers or of transformers, which share `from_pretrained` but no base class
    """The model of a component with the weights of its folder.

    Raises CheckpointError if it does not load, or if a weight of the model is not in the file.
    """
    # transformers reads tensor by tensor to the device. diffusers, whose autoencoders are small, could not say what
    # is missing if it did.
    options = {"torch_dtype": dtype} if issubclass(model_class, ModelMixin) else {"dtype": dtype, "device_map": device}
    try:
        model, info = model_class.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        _refuse_other_sizes(path, model_class, dtype)
        raise CheckpointError(f"{path} does not load as {model_class.__name__}: {error}") from error
    wrong = {kind: sorted(map(str, info.get(kind, ()))) for kind in ("missing_keys", "mismatched_keys")}
    if any(wrong.values()):
        # Both libraries would go on with random weights in these places.
        raise CheckpointError(f"{path} does not hold all weights of {model_class.__name__}: {wrong}. Fetch it again.")
    return model


def _refuse_other_sizes(path: Path, model_class: type[Any], dtype: torch.dtype) -> None:  # Any: as in `read_model`
    """Raise CheckpointError for a component that did not load, if that is due to the shape of its tensors."""
    stem = _WEIGHTS if issubclass(model_class, ModelMixin) else "model"
    files = safetensors_files(path, stem)
    if files is not None:
        model = from_configuration(model_class, path, dtype, "meta")
        problem = size_problem(model, file_tensors(model, TensorFiles(files)), path)
        if problem is not None:
            raise CheckpointError(problem)


def read_processor(folder: PipelineFolder, name: str) -> Any:  # Any: processors share no base class
    """A tokenizer or image processor by the class that the index names. Raises CheckpointError if it does not load."""
    class_name = str(folder.class_of(name))
    path = folder.path / name
    found = vars(transformers).get(class_name) or getattr(transformers, class_name, None)
    if found is None:
        raise CheckpointError(f"{path}: transformers {transformers.__version__} has no class {class_name}.")
    try:
        return found.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not load as {class_name}: {error}") from error
