"""Random text encoders, tokenizers and schedulers that several families share. Any: classes of both libraries."""

import itertools
from typing import Any

import diffusers
from tokenizers import AddedToken

from ..tiny_text import text_tokenizer


def dynamic_scheduler(**changes: Any) -> Any:
    """Flow matching whose shift follows the resolution."""
    fields: dict[str, Any] = {
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "time_shift_type": "exponential",
    }
    return diffusers.FlowMatchEulerDiscreteScheduler(**fields | changes)


def template_tokenizer(prefix: str, num_tokens: int) -> Any:
    """Bytes, and `num_tokens` words that `prefix` is made of: as long in tokens as the real tokenizer makes it."""
    tokenizer = text_tokenizer()
    size = len(prefix) // num_tokens
    cuts = [*(place * size for place in range(num_tokens)), len(prefix)]
    words = [prefix[start:end] for start, end in itertools.pairwise(cuts)]
    # Vocabulary entries that are no text of their own, so that every cut of the prefix is found first.
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=True) for word in dict.fromkeys(words)])
    found = len(tokenizer(prefix).input_ids)
    assert found == num_tokens, f"{found} tokens instead of {num_tokens}"
    return tokenizer
