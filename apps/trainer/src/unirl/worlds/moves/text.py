"""Tokenizer and text encoder of the moves world: a UMT5 encoder taught what prompts ask for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from unirl.pretraining.probing import SPECIALS, fact_losses, token_ids, train_by_probes, word_loss, word_tokenizer
from unirl.reward.worlds.moves_grammar import COLORS, MOTIONS, parse_prompt
from unirl.reward.worlds.shapes_grammar import SHAPES

TOKENS = 7
"""Longest prompt, three words an object, and its end marker: the `max_sequence_length` to give to the pipeline."""
VOCABULARY = {word: index for index, word in enumerate((*SPECIALS, *COLORS, *SHAPES, *MOTIONS))}
WIDTH = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for which "moves left" is one word; it drops the article and the comma."""
    joined = [motion for motion in MOTIONS if " " in motion]
    return word_tokenizer(VOCABULARY, joined=joined, has_start=False, max_length=TOKENS)


def make_encoder() -> UMT5EncoderModel:
    """A UMT5 encoder of 0.2 M parameters."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(VOCABULARY),
            d_model=WIDTH,
            d_kv=32,
            d_ff=WIDTH,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            pad_token_id=VOCABULARY["<pad>"],
            eos_token_id=VOCABULARY["</s>"],
        )
    )


def pretrain_text_encoder(
    prompts: Sequence[str],
    encoder: UMT5EncoderModel,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
) -> float:
    """Train in place by linear probes on the last hidden state; returns the share of right answers."""
    facts_PF = torch.tensor([_facts(prompt) for prompt in prompts])
    ids_PT = token_ids(make_tokenizer(), prompts)
    fact_sizes = (facts_PF.amax(0) + 1).tolist()
    fact_probe, word_probe = nn.Linear(WIDTH, sum(fact_sizes)), nn.Linear(WIDTH, 3 * len(VOCABULARY))

    def batch() -> tuple[list[Tensor], list[Tensor]]:
        rows = torch.randint(len(prompts), (batch_size,))
        ids, facts = ids_PT[rows], facts_PF[rows]
        # The pipeline masks padding and sets its states to zero.
        mask = (ids != VOCABULARY["<pad>"]).long()
        hidden = encoder(ids, mask).last_hidden_state * mask[..., None]
        hits: list[Tensor] = []
        losses = fact_losses(fact_probe(hidden.mean(1)), facts, fact_sizes, hits)
        losses.append(word_loss(word_probe(hidden), ids, has_next=True))
        return losses, hits

    modules = (encoder, fact_probe, word_probe)
    return train_by_probes(modules, batch, num_steps=num_steps, learning_rate=learning_rate)


def _facts(prompt: str) -> list[int]:
    """Number, then colour, shape and motion of the first and of the second object; 0 means none."""
    objects = parse_prompt(prompt).objects
    facts = [len(objects)]
    for place in range(2):
        if place < len(objects):
            each = objects[place]
            facts += [
                1 + COLORS.index(each.item.color),
                1 + SHAPES.index(each.item.shape),
                1 + MOTIONS.index(each.motion),
            ]
        else:
            facts += [0, 0, 0]
    return facts
