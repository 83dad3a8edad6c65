"""Tokenizer, text encoder and connectors of the sounds world: a Gemma 3 taught what prompts ask for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from unirl.pretraining.probing import SPECIALS, fact_losses, token_ids, train_by_probes, word_tokenizer
from unirl.reward.worlds.moves_grammar import COLORS, MOTIONS
from unirl.reward.worlds.shapes_grammar import SHAPES
from unirl.reward.worlds.sounds_grammar import TONES, parse_prompt

TOKENS = 5
"""Colour, shape, motion, tone and the end mark: the `max_sequence_length` to give to the pipeline."""
WORDS = (*SPECIALS, *COLORS, *SHAPES, *MOTIONS, *(f"{tone} tone" for tone in TONES))
VOCABULARY = {word: index for index, word in enumerate(WORDS)}
WIDTH = 64
NUM_LAYERS = 2


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for which "moves left" and "high tone" are words; it drops article and comma."""
    joined = [word for word in WORDS if " " in word]
    return word_tokenizer(VOCABULARY, joined=joined, has_start=False, max_length=TOKENS)


def make_encoder() -> Gemma3ForConditionalGeneration:
    """A Gemma 3 of 0.1 M parameters; its eyes, which the class must have, see nothing and cost nothing."""
    size = len(VOCABULARY)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                "vocab_size": size + 3,
                "hidden_size": WIDTH,
                "intermediate_size": WIDTH,
                "num_hidden_layers": NUM_LAYERS,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "pad_token_id": VOCABULARY["<pad>"],
                "bos_token_id": VOCABULARY["<s>"],
                "eos_token_id": VOCABULARY["</s>"],
            },
            vision_config={
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
            image_token_index=size,
            boi_token_index=size + 1,
            eoi_token_index=size + 2,
        )
    )


def make_connectors() -> LTX2TextConnectors:
    """One layer for each stream; registers stand for the padding."""
    stream = {
        "num_attention_heads": 2,
        "attention_head_dim": WIDTH // 2,
        "num_layers": 1,
        "num_learnable_registers": TOKENS,
    }
    return LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=NUM_LAYERS + 1,
        connector_rope_base_seq_len=TOKENS,
        **{f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in stream.items()},
    )


def pretrain_text_encoder(
    prompts: Sequence[str],
    encoder: Gemma3ForConditionalGeneration,
    connectors: LTX2TextConnectors,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
) -> float:
    """Train both in place by linear probes on what each stream reads; returns the share of right answers."""
    facts_PF = torch.tensor([_facts(prompt) for prompt in prompts])
    ids_PT = token_ids(make_tokenizer(), prompts)
    fact_sizes = (facts_PF.amax(0) + 1).tolist()
    probes = [nn.Linear(WIDTH, sum(fact_sizes)) for _ in range(2)]

    def batch() -> tuple[list[Tensor], list[Tensor]]:
        rows = torch.randint(len(prompts), (batch_size,))
        ids, facts = ids_PT[rows], facts_PF[rows]
        mask = torch.ones_like(ids)
        states = encoder(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        video, audio, _ = connectors(torch.stack(states, dim=-1).flatten(2, 3), mask)
        hits: list[Tensor] = []
        losses = [
            loss
            for probe, features in zip(probes, (video, audio), strict=True)
            for loss in fact_losses(probe(features.mean(1)), facts, fact_sizes, hits)
        ]
        return losses, hits

    modules = (encoder, connectors, *probes)
    return train_by_probes(modules, batch, num_steps=num_steps, learning_rate=learning_rate)


def _facts(prompt: str) -> list[int]:
    """Colour, shape, motion and tone."""
    spec = parse_prompt(prompt)
    [moving] = spec.video.objects
    return [
        COLORS.index(moving.item.color),
        SHAPES.index(moving.item.shape),
        MOTIONS.index(moving.motion),
        list(TONES).index(spec.tone),
    ]
