"""Text of Z-Image: the last hidden state but one of Qwen3, without padding.

Equal to ZImagePipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders, language_states, user_turns
from unirl.types.conditions import TextEmbedCondition


class ZImageTextEncoders(TextEncoders):
    """Ragged texts with a mask."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        turns = user_turns(self.tokenizers["tokenizer"], texts, enable_thinking=True)
        tokens = self.tokens(turns, max_sequence_length)
        return language_states(self.encoders["text_encoder"], tokens, layer=-2)
