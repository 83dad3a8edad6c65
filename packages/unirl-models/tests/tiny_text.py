"""Random language models of some 100,000 parameters in the folder layout of real ones, from their real classes.

Any stands for classes of transformers, which it types as unions with placeholders.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def text_tokenizer(*, chat_template: str | None = TEMPLATE) -> Any:
    """Bytes first, then Qwen's special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=SPECIAL[0],
        additional_special_tokens=[s for s in SPECIAL if s not in (END, SPECIAL[0])],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3(*, seed: int = 0, **changes: Any) -> Any:
    """Two layers of width 64, four heads of width 32, two of keys. Weights large enough for a peaked softmax."""
    tokenizer = text_tokenizer()
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))


def save_text_model(model: Any, folder: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    """The folder that a real model has: weights, configurations and tokenizer."""
    model.save_pretrained(folder)
    text_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
