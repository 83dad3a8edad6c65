"""Text of FLUX.1: the hidden states of T5 and the pooled vector of CLIP.

Equal to FluxPipeline.encode_prompt of diffusers. The transformer attends to the padding too, so the number of tokens is
part of what the model sees. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition

CLIP_TOKENS = 77


class FluxTextEncoders(TextEncoders):
    """Texts of exactly `max_sequence_length` tokens with a pooled vector, without a mask."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        limit = min(self.tokenizers["tokenizer"].model_max_length, CLIP_TOKENS)
        pooled = self.encoders["text_encoder"](self._ids("", texts, limit)).pooler_output
        hidden = self.encoders["text_encoder_2"](self._ids("_2", texts, max_sequence_length))[0]
        return TextEmbedCondition(embeds=hidden, pooled=pooled)

    def _ids(self, suffix: str, texts: Sequence[str], length: int) -> Tensor:
        tokens = self.tokenizers[f"tokenizer{suffix}"](
            list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        return tokens.input_ids.to(self.encoders[f"text_encoder{suffix}"].device)
