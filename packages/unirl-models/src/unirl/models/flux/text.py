"""Text of FLUX.1: the hidden states of T5 and the pooled vector of CLIP.

Equal to FluxPipeline.encode_prompt of diffusers. The transformer attends to the padding too, so the number of tokens is
part of what the model sees. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition

CLIP_TOKENS = 77


class FluxTextEncoders(TextEncoders):
    """Texts of exactly `max_sequence_length` tokens with a pooled vector, without a mask."""

    def token_limits(self, max_sequence_length: int) -> dict[str, int]:
        """CLIP only gives a vector of the whole; what counts is T5."""
        return {"_2": max_sequence_length}

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        limit = min(self.tokenizers["tokenizer"].model_max_length, CLIP_TOKENS)
        pooled = self.encoders["text_encoder"](self.tokens(texts, limit).input_ids).pooler_output
        ids = self.tokens(texts, max_sequence_length, suffix="_2").input_ids
        return TextEmbedCondition(embeds=self.encoders["text_encoder_2"](ids)[0], pooled=pooled)
