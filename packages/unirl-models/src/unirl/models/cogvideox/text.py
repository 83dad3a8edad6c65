"""Text of CogVideoX: the last hidden state of T5 over a fixed number of tokens, padding included, without a mask.

Equal to CogVideoXPipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition


class CogVideoXTextEncoders(TextEncoders):
    """Texts of one length; what pads them is read too."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        ids = self.tokens(texts, max_sequence_length).input_ids
        return TextEmbedCondition(embeds=self.encoders["text_encoder"](ids)[0])
