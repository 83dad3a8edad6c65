"""Text of Z-Image: the last hidden state but one of Qwen3, without padding.

Equal to ZImagePipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.types.conditions import TextEmbedCondition


class ZImageTextEncoders(TextEncoders):
    """Ragged texts with a mask."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        encoder, tokenizer = self.encoders["text_encoder"], self.tokenizers["tokenizer"]
        turns = [[{"role": "user", "content": text}] for text in texts]
        tokens = tokenizer(
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=True),
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(encoder.device)
        hidden = encoder(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask.bool(),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states[-2]
        return ragged([row[mask.bool()] for row, mask in zip(hidden, tokens.attention_mask, strict=True)])
