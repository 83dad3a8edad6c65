"""Weights in half the bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor, nn
from transformers import PreTrainedModel

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def rounded(module: ModuleT) -> ModuleT:
    """The module in evaluation mode, in float32, with the fp16 values that a checkpoint will hold."""
    return module.half().float().eval()


def save_half(model: PreTrainedModel, out: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a model with its weights in fp16; it loads in fp32 unless asked otherwise. state: default, the model's."""
    state = model.state_dict() if state is None else state
    model.save_pretrained(out, state_dict={name: tensor.half() for name, tensor in state.items()})
    load_in_fp32(out / "config.json")


def save_pipeline_half(pipeline: DiffusionPipeline, out: Path) -> None:
    """Write a pipeline with all weights in fp16; it loads in fp32 unless asked otherwise."""
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    for name, module in modules.items():
        setattr(pipeline, name, copy.deepcopy(module).half())
    pipeline.save_pretrained(out, safe_serialization=True)
    for name, module in modules.items():
        setattr(pipeline, name, module)
    # If no dtype is asked for, transformers takes the one of the configuration, diffusers always fp32.
    for path in out.glob("text_encoder*/config.json"):
        load_in_fp32(path)


def load_in_fp32(config: Path) -> None:
    """Let a configuration ask for fp32: if no dtype is asked for, transformers takes the configuration's."""
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "dtype": "float32"}, indent=2) + "\n")
