"""Words that a prompt wants drawn, as ByT5 reads them: a second stream of text beside the language model's.

Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unirl.models.diffusers_pipeline.text import ragged
from unirl.types.conditions import TextEmbedCondition


def glyph_embeds(
    encoder: Any,  # Any: a T5EncoderModel
    tokenizer: Any,  # Any: its tokenizer
    words: Sequence[Sequence[str]],
    max_tokens: int,
) -> TextEmbedCondition:
    """The last hidden state of ByT5 over `Text "a". Text "b". `, ragged; no tokens for a prompt without words.

    words: of each prompt, in the order in which they are drawn.
    """
    rows = [torch.zeros(0, encoder.config.d_model, dtype=encoder.dtype, device=encoder.device) for _ in words]
    drawn = [row for row, found in enumerate(words) if found]
    if drawn:
        tokens = tokenizer(
            ["".join(f'Text "{word}". ' for word in words[row]) for row in drawn],
            padding=True,
            max_length=max_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(encoder.device)
        hidden = encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask.float())[0]
        for row, states, mask in zip(drawn, hidden, tokens.attention_mask, strict=True):
            rows[row] = states[mask.bool()]
    return ragged(rows)
