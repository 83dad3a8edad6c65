"""The tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.types.errors import CheckpointError

with from_extra("transformers"):
    import transformers

NUM_BYTES = 256
"""Words that every byte-level tokenizer has."""


def load_tokenizer(path: Path, *, model_type: str | None = None) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises CheckpointError if there is none that loads.

    model_type: of a folder whose own configuration transformers does not know; it then takes a folder without a
    vocabulary for an empty one, which the caller checks.
    """
    config = None if model_type is None else transformers.AutoConfig.for_model(model_type)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, config=config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{path} has no tokenizer that loads: {error}") from error
    if tokenizer is None:
        raise CheckpointError(f"{path} has no tokenizer. Fetch the folder again.")
    return tokenizer


def require_words(tokenizer: Any, words: Sequence[str], vocabulary_size: int, path: Path) -> list[int]:
    """Ids of special words. Raises CheckpointError if the tokenizer lacks one, or has more words than the model.

    tokenizer: of transformers.
    """
    if tokenizer.vocab_size < NUM_BYTES:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} words besides its marks, fewer than there are bytes: "
            "its vocabulary (tokenizer.json, or vocab.json and merges.txt) is missing. Fetch the folder again."
        )
    vocabulary = tokenizer.get_vocab()
    missing = [word for word in words if word not in vocabulary]
    largest = max(vocabulary.values())
    if missing or largest >= vocabulary_size:
        raise CheckpointError(
            f"{path}: tokenizer and model disagree. The tokenizer lacks {missing[:8] or 'no mark'} and its largest id "
            f"is {largest}; the model has {vocabulary_size} words. Fetch the folder again."
        )
    return [vocabulary[word] for word in words]
