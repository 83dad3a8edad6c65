"""Words that a prompt wants drawn, as ByT5 reads them: a second stream of text next to the language model's.

Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.types.conditions import TextEmbedCondition


class GlyphTextEncoders(TextEncoders):
    """Text encoders with ByT5 as the second: "text" as the family reads it, and "text_2" of words to draw."""

    max_glyph_tokens: ClassVar[int]
    """Tokens at which the words of a prompt are cut."""

    @abstractmethod
    def words_to_draw(self, prompt: str) -> list[str]:
        """The words of a prompt, in the order in which they are drawn."""

    def _encode_beside(self, texts: Sequence[str]) -> dict[str, TextEmbedCondition]:
        words = [self.words_to_draw(text) for text in texts]
        encoder, tokenizer = self.encoders["text_encoder_2"], self.tokenizers["tokenizer_2"]
        return {"text_2": glyph_embeds(encoder, tokenizer, words, self.max_glyph_tokens)}


def glyph_embeds(
    encoder: Any,  # Any: a T5EncoderModel
    tokenizer: Any,  # Any: its tokenizer
    words: Sequence[Sequence[str]],
    max_tokens: int,
) -> TextEmbedCondition:
    """The last hidden state of ByT5 over `Text "a". Text "b". `, ragged; no tokens for a prompt without words."""
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
