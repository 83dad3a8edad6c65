"""The text encoder of the FLUX.2 shapes checkpoint: a Qwen3 of 28 thin layers, of which layers 9, 18 and 27 are read.

As those of SD3 it is taught by probes on what the pipeline reads (see `unirl.worlds.shapes.text`); a token of a causal
model knows only the words before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unirl.pretraining.probing import fact_losses, token_ids, train_by_probes, word_loss
from unirl.worlds.shapes.text import VOCABULARY, facts_of, make_tokenizer

TOKENS = 6
"""Longest prompt and its end marker: the `max_sequence_length` to give to the pipeline."""
READ_LAYERS = (9, 18, 27)
"""Hidden states that Flux2KleinPipeline reads, end to end."""
WIDTH = 32
NUM_LAYERS = 28
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Words and an end marker; a conversation is its content."""
    tokenizer = make_tokenizer(has_start=False, max_length=TOKENS)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_qwen3() -> Qwen3ForCausalLM:
    """A Qwen3 of 0.26 M parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.1,
            pad_token_id=VOCABULARY["<pad>"],
            bos_token_id=VOCABULARY["<s>"],
            eos_token_id=VOCABULARY["</s>"],
        )
    )


def pretrain_qwen3(
    prompts: Sequence[str],
    encoder: Qwen3ForCausalLM,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
) -> float:
    """Train the encoder in place; returns the share of right answers. Facts are read at the end marker."""
    ids_PT = token_ids(make_qwen3_tokenizer(), prompts)
    end_P = (ids_PT == VOCABULARY["</s>"]).int().argmax(1)
    facts_PF = torch.tensor([facts_of(prompt) for prompt in prompts])
    fact_sizes = (facts_PF.amax(0) + 1).tolist()
    width = len(READ_LAYERS) * WIDTH
    fact_probe, word_probe = nn.Linear(width, sum(fact_sizes)), nn.Linear(width, 3 * len(VOCABULARY))

    def batch() -> tuple[list[Tensor], list[Tensor]]:
        rows = torch.randint(len(prompts), (batch_size,))
        ids = ids_PT[rows]
        hidden = encoder(ids, attention_mask=(ids != VOCABULARY["<pad>"]).long(), output_hidden_states=True)
        read = torch.cat([hidden.hidden_states[layer] for layer in READ_LAYERS], dim=-1)
        hits: list[Tensor] = []
        losses = fact_losses(fact_probe(read[torch.arange(batch_size), end_P[rows]]), facts_PF[rows], fact_sizes, hits)
        losses.append(word_loss(word_probe(read), ids, has_next=False))
        return losses, hits

    modules = (encoder, fact_probe, word_probe)
    return train_by_probes(modules, batch, num_steps=num_steps, learning_rate=learning_rate)
