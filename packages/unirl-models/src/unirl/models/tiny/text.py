"""Random text encoders and tokenizers of single bytes.

Any stands for classes of transformers, which types them as unions with placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.models.extras import from_extra

with from_extra("transformers"):
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_END = "<|im_end|>"
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_text() -> Any:
    """Four layers of width 16, so that the hidden state that families read is neither the first nor the last."""
    return transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            vocab_size=400,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        )
    )


def qwen3_text() -> Any:
    """Two layers of width 64."""
    return transformers.Qwen3Model(
        transformers.Qwen3Config(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.1,
        )
    )


def byt5() -> Any:
    """Two layers of width 12 over bytes."""
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=12, d_kv=6, d_ff=16, num_layers=2, num_heads=2)
    )


def clip_config(**sizes: Any) -> Any:
    """Two layers for the tokens of `clip_tokenizer`. sizes: as transformers takes them."""
    return transformers.CLIPTextConfig(
        vocab_size=300,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        **sizes,
    )


def clip_encoder() -> Any:
    """Two layers of width 16."""
    config = clip_config(hidden_size=16, intermediate_size=24, projection_dim=16, hidden_act="gelu")
    return transformers.CLIPTextModelWithProjection(config)


def t5_encoder() -> Any:
    """Two layers of width 48: wider than both CLIP encoders together, as in the real model."""
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=48, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )


def byte_tokenizer(first: dict[str, int], **special: Any) -> Any:
    """A tokenizer of single bytes: `first` are the ids that precede them. special: as transformers takes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={**first, **{char: len(first) + i for i, char in enumerate(alphabet)}}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def t5_tokenizer(**special: Any) -> Any:
    """T5's special tokens, then bytes."""
    first = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    return byte_tokenizer(first, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", **special)


def clip_tokenizer() -> Any:
    """As long as CLIP reads: bytes first, then begin and end of text, as CLIP's own order has it."""
    end = "<|endoftext|>"
    return byte_tokenizer(
        {}, model_max_length=77, bos_token="<|startoftext|>", eos_token=end, pad_token=end, unk_token=end
    )


def chat_bytes() -> Any:
    """Bytes with the template of a conversation."""
    tokenizer = byte_tokenizer(
        {}, eos_token=_END, pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def chat_tokenizer(system_prompt: str, num_tokens: int) -> Any:
    """The same, and one word for the beginning of a conversation under `system_prompt`, which has `num_tokens` with it:
    as many as the real tokenizer makes of it."""
    return template_tokenizer(f"<|im_start|>system\n{system_prompt}{_END}\n<|im_start|>user\n", num_tokens)


def template_tokenizer(prefix: str, num_tokens: int, marks: Sequence[str] = (), tokenizer: Any = None) -> Any:
    """`chat_bytes` or another tokenizer with marks, and with a word that makes `prefix` as long in tokens as the real
    tokenizer makes it."""
    tokenizer = chat_bytes() if tokenizer is None else tokenizer
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    lengths = {place: len(tokenizer(prefix[place:]).input_ids) for place in range(len(prefix))}
    cut = max(place for place, length in lengths.items() if length == num_tokens - 1)
    tokenizer.add_tokens([AddedToken(prefix[:cut], normalized=False, special=True)])
    return tokenizer
