"""Reads the whole model of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unirl.models.extras import from_extra
from unirl.types.errors import CheckpointError

with from_extra("transformers"):
    from safetensors import SafetensorError


def read_model(
    auto_class: Any, path: Path, dtype: torch.dtype, device: torch.device
) -> Any:  # Any: an auto class of transformers, and PreTrainedModel without the attributes of its families
    """The model with the weights of its folder. Draws no random numbers.

    Raises CheckpointError if it does not load, or weights are missing.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # some constructors draw values, which the folder's replace
            model, info = auto_class.from_pretrained(path, dtype=dtype, output_loading_info=True, device_map=device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} does not load: {error}") from error
    wrong = {kind: sorted(map(str, info.get(kind, ()))) for kind in ("missing_keys", "mismatched_keys")}
    if any(wrong.values()):
        # transformers would go on with random weights in these places.
        raise CheckpointError(f"{path} does not hold all weights of {type(model).__name__}: {wrong}.")
    return model
