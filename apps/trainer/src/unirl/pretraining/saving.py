"""Weights in half the bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel


def save_half(model: PreTrainedModel, out: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a model with its weights in fp16; it loads in fp32 unless asked otherwise. state: default, the model's."""
    state = model.state_dict() if state is None else state
    model.save_pretrained(out, state_dict={name: tensor.half() for name, tensor in state.items()})
    load_in_fp32(out / "config.json")


def load_in_fp32(config: Path) -> None:
    """Let a configuration ask for fp32: where nobody asks for a dtype, transformers takes the configuration's."""
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "dtype": "float32"}, indent=2) + "\n")
