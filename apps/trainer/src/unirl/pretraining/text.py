"""The tokenizer and the architecture of the small language models."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|im_end|>"
PAD = "<|endoftext|>"


def byte_tokenizer(special: Sequence[str] = ("<|im_start|>",)) -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be read; then Qwen's end and padding and `special`."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=list(special)
    )


def small_qwen3(
    tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, width: int, num_positions: int
) -> Qwen3ForCausalLM:
    """A random Qwen3 of two layers with four heads of width 32, what vLLM's CPU kernels take at least."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=num_positions,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)
