"""Random text encoders, tokenizers and schedulers that several families share. Any: classes of both libraries."""

from pathlib import Path
from typing import Any

import diffusers
import transformers
from tokenizers import AddedToken

from unirl.models.diffusers_pipeline.export import LORA_FILE

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
    """Bytes, and one word that makes `prefix` as long in tokens as the real tokenizer makes it."""
    tokenizer = text_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    cut = next(place for place in reversed(range(len(prefix))) if count(prefix[place:]) == num_tokens - 1)
    tokenizer.add_tokens([AddedToken(prefix[:cut], normalized=False, special=True)])
    assert count(prefix) == num_tokens
    return tokenizer


def byt5() -> Any:
    """Two layers of width 12 over bytes."""
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=12, d_kv=6, d_ff=16, num_layers=2, num_heads=2)
    )


def load_lora_by_model(stock: Any, folder: Path) -> None:
    """For a pipeline class of diffusers without `load_lora_weights`: its transformer loads the file."""
    stock.transformer.load_lora_adapter(str(folder), prefix="transformer", weight_name=LORA_FILE)
