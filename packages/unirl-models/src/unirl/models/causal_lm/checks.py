"""What a language model must be for its tokens to be scored, and its layers to be trained."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from unirl.types.errors import CheckpointError, ConfigError

_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings whose frequencies follow the longest position of a forward."""


def plain_projection(model: Any) -> nn.Linear:  # Any: a model of transformers
    """The linear layer onto the vocabulary. Raises ConfigError for a model that has another one."""
    projection = model.get_output_embeddings()
    if type(projection) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__} projects onto its vocabulary by a {type(projection).__name__}; tokens "
            "can be scored after a plain linear layer only."
        )
    return projection


def check_tokenizer(tokenizer: Any, model: Any, vocabulary_size: int, path: Path) -> None:  # Any: of transformers
    """Raises CheckpointError for a tokenizer of more words than the model. path: their folder."""
    largest = max(tokenizer.get_vocab().values())
    rows = min(vocabulary_size, model.get_input_embeddings().num_embeddings)
    if largest >= rows:
        raise CheckpointError(
            f"{path}: tokenizer and model disagree, the tokenizer's largest id is {largest} and the "
            f"model has {rows} words. The tokenizer's files are of another model: fetch the folder again."
        )


def check_blocks(model: nn.Module, block_class_names: Collection[str]) -> None:
    """Raises ConfigError for a model without any of the blocks that training wraps."""
    names = set(block_class_names)
    if not any(type(module).__name__ in names for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} declares the blocks {sorted(names)} and has none of them. Derive a "
            "bundle that names its block_class_names."
        )


def rotations_by_length(config: Any) -> list[str]:  # Any: a configuration of transformers
    """Sorted types of the rotary embeddings that depend on the longest position of a forward."""
    rope = getattr(config, "rope_parameters", None) or {}  # of all layers, or by type of layer
    types = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)} & _ROPE_BY_LENGTH
    return sorted(types)
