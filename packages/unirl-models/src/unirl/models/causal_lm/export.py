"""Merged weights as a whole model folder, as transformers writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from unirl.models.extras import from_extra
from unirl.models.merged_export import check_fits, copy_others, export_folder

with from_extra("transformers"):
    from transformers import PreTrainedModel

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def write_merged(folder: str, checkpoint: Path, trained: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Writes `weights` by save_pretrained, and copies the other files of `checkpoint`.

    trained: has the configuration, the class and the buffers. weights: in host memory, LoRA already merged; tied ones
    may be named once. Tensors keep their dtype. Raises ConfigError if `folder` is the checkpoint itself,
    CheckpointError if names or shapes do not fit.
    """
    target = export_folder(folder, checkpoint)
    with torch.device("meta"):
        model = type(trained)(trained.config)
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    weights.update({name: weights[source] for name, source in ties.items() if source in weights})
    expected = dict(model.named_parameters(remove_duplicate=False))
    buffers = [name for name, _ in trained.named_buffers()]
    check_fits(weights, expected, checkpoint, optional=buffers)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    copy_others(checkpoint, target, *_WEIGHT_FILES, "onnx")
    model.load_state_dict(weights, strict=False, assign=True)
    if len(dtypes) == 1:
        model.config.dtype = dtypes.pop()
    model.save_pretrained(target, state_dict={name: weights[name] for name in expected if name not in ties})
