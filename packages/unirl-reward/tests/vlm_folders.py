"""Tiny random Qwen-VL checkpoints in the layout of the hub."""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
WORDS = ["Yes", "yes", "ĠYes", "Ġyes", "No", "no", "ĠNo", "Ġno", "seven", "Seven", "Ġseven"]
"""Separate tokens, as in real vocabularies; Ġ stands for a space."""
SPECIALS = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A byte-level tokenizer in which each of WORDS is one token."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    merges = []
    for word in WORDS:
        pieces = [("Ġ", word[1:])] if word[0] == "Ġ" else [(word[:end], word[end]) for end in range(1, len(word))]
        for left, right in pieces:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIALS,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def qwen_vl_config(family: Family, tokenizer: Any) -> Any:
    """Two layers of width 64, patches of 14 or 16 pixels."""

    def token(name: str) -> int:
        return tokenizer.convert_tokens_to_ids(name)

    text: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 8,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tokens: dict[str, Any] = {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    if family == "qwen2_vl":
        seen = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=seen, **tokens)
    vision: dict[str, Any] = {"hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"depth": 1, "patch_size": 14, "fullatt_block_indexes": [0]}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    vision |= {"depth": 2, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def write_processor(folder: Path, tokenizer: Any, patch: int) -> None:
    """Tokenizer and image processor, for images of 4 to 16 merged patches."""
    tokenizer.save_pretrained(folder)
    side = 2 * patch
    size = {"shortest_edge": 4 * side * side, "longest_edge": 16 * side * side}
    transformers.Qwen2VLImageProcessorPil(patch_size=patch, size=size).save_pretrained(folder)


def write_qwen_vl(folder: Path, family: Family) -> str:
    """A whole model under `folder`. Returns its path."""
    tokenizer = byte_tokenizer()
    config = qwen_vl_config(family, tokenizer)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.model.visual.parameters():  # so that what the image shows makes a difference
        parameter.data.mul_(4) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    write_processor(folder, tokenizer, config.vision_config.patch_size)
    return str(folder)
