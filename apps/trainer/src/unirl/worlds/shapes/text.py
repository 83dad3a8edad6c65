"""Tokenizers and text encoders of the shapes world: two CLIP encoders and a T5 encoder, taught what prompts ask for.

Real text encoders arrive pretrained, so these are too: linear probes on their outputs must recover colours, shapes,
number and relation, and from every token the words around it. The probes are then thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from unirl.pretraining.probing import SPECIALS, fact_losses, token_ids, train_by_probes, word_loss, word_tokenizer
from unirl.reward.worlds.shapes_grammar import CATEGORIES, COLORS, NUMBERS, RELATIONS, SHAPES, parse_prompt

CLIP_TOKENS = 7
"""Longest prompt, five words, between two markers; the pipeline pads CLIP prompts to this."""
T5_TOKENS = 6
"""Longest prompt and its end marker: the `max_sequence_length` to give to the pipeline."""
WORDS = ("and", *RELATIONS, *NUMBERS, *COLORS, *SHAPES, *(f"{shape}s" for shape in SHAPES))
VOCABULARY = {word: index for index, word in enumerate((*SPECIALS, *WORDS))}

_CLIP_WIDTH = 64
T5_WIDTH = 2 * _CLIP_WIDTH
"""The pipeline pads the two CLIP encoders, side by side, to the width of T5; equal widths waste nothing."""


def make_tokenizer(*, has_start: bool, max_length: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer for which "left of" and "right of" are one word."""
    return word_tokenizer(VOCABULARY, joined=("left of", "right of"), has_start=has_start, max_length=max_length)


def make_clip() -> CLIPTextModelWithProjection:
    """A CLIP text encoder of 0.07 M parameters."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=_CLIP_WIDTH,
            intermediate_size=2 * _CLIP_WIDTH,
            projection_dim=_CLIP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_TOKENS,
            pad_token_id=VOCABULARY["<pad>"],
            bos_token_id=VOCABULARY["<s>"],
            eos_token_id=VOCABULARY["</s>"],
        )
    )


def make_t5() -> T5EncoderModel:
    """A T5 encoder of 0.2 M parameters."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(VOCABULARY),
            d_model=T5_WIDTH,
            d_kv=32,
            d_ff=T5_WIDTH,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            pad_token_id=VOCABULARY["<pad>"],
            eos_token_id=VOCABULARY["</s>"],
        )
    )


def pretrain_text_encoders(
    prompts: Sequence[str],
    clips: Sequence[CLIPTextModelWithProjection],
    t5: T5EncoderModel,
    *,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
) -> float:
    """Train the encoders in place by linear probes on what the pipeline will read; returns the share of right answers.

    Read are: of CLIP the projected end token and `hidden_states[-2]`, of T5 the last hidden state.
    """
    facts_PF = torch.tensor([facts_of(prompt) for prompt in prompts])
    clip_ids_PT = token_ids(make_tokenizer(has_start=True, max_length=CLIP_TOKENS), prompts)
    t5_ids_PT = token_ids(make_tokenizer(has_start=False, max_length=T5_TOKENS), prompts)
    fact_sizes = (facts_PF.amax(0) + 1).tolist()
    fact_probes = nn.ModuleList(nn.Linear(width, sum(fact_sizes)) for width in (_CLIP_WIDTH, _CLIP_WIDTH, T5_WIDTH))
    word_probes = nn.ModuleList(nn.Linear(width, 3 * len(VOCABULARY)) for width in (_CLIP_WIDTH, _CLIP_WIDTH, T5_WIDTH))

    def batch() -> tuple[list[Tensor], list[Tensor]]:
        rows = torch.randint(len(prompts), (batch_size,))
        clip_ids, t5_ids, facts = clip_ids_PT[rows], t5_ids_PT[rows], facts_PF[rows]
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        for index, clip in enumerate(clips):
            output = clip(clip_ids, output_hidden_states=True)
            losses += fact_losses(fact_probes[index](output.text_embeds), facts, fact_sizes, hits)
            losses.append(word_loss(word_probes[index](output.hidden_states[-2]), clip_ids, has_next=False))
        hidden = t5(t5_ids)[0]
        losses += fact_losses(fact_probes[2](hidden.mean(1)), facts, fact_sizes, hits)
        losses.append(word_loss(word_probes[2](hidden), t5_ids, has_next=True))
        return losses, hits

    modules = (*clips, t5, fact_probes, word_probes)
    share = train_by_probes(modules, batch, num_steps=num_steps, learning_rate=learning_rate)
    _standardise_projections(clips, clip_ids_PT)
    return share


def facts_of(prompt: str) -> list[int]:
    """Category, number, relation, then colour and shape of the first and of the second object; 0 means none."""
    spec = parse_prompt(prompt)
    second = spec.objects[1] if len(spec.objects) > 1 and spec.category != "count" else None
    return [
        CATEGORIES.index(spec.category),
        len(spec.objects),
        0 if spec.relation is None else 1 + RELATIONS.index(spec.relation),
        COLORS.index(spec.objects[0].color),
        SHAPES.index(spec.objects[0].shape),
        0 if second is None else 1 + COLORS.index(second.color),
        0 if second is None else 1 + SHAPES.index(second.shape),
    ]


@torch.no_grad()
def _standardise_projections(clips: Sequence[CLIPTextModelWithProjection], clip_ids_PT: Tensor) -> None:
    """Scale the projection so that a pooled feature has unit mean square over the prompts."""
    for clip in clips:
        pooled = clip(clip_ids_PT).text_embeds
        clip.text_projection.weight /= pooled.square().mean().sqrt()
