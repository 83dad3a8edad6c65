"""Text of Qwen-Image: the last hidden state of Qwen2.5-VL over a fixed request for a description.

Equal to QwenImagePipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.types.conditions import TextEmbedCondition

SYSTEM_PROMPT = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
TEMPLATE = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_TOKENS = 34
"""Tokens of the template before the prompt, which are cut off. A fixed number, as in the published pipeline."""
TOKENIZER_LIMIT = 1024


class QwenImageTextEncoders(TextEncoders):
    """Ragged texts with a mask: the tokens of the prompt and of the template's end."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        encoder = self.encoders["text_encoder"]
        tokens = self.tokenizers["tokenizer"](
            [TEMPLATE.format(text) for text in texts],
            max_length=TOKENIZER_LIMIT + TEMPLATE_TOKENS,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(encoder.device)
        hidden = encoder(**tokens, output_hidden_states=True).hidden_states[-1]
        return ragged(
            [
                row[mask.bool()][TEMPLATE_TOKENS:][:max_sequence_length]
                for row, mask in zip(hidden, tokens.attention_mask, strict=True)
            ]
        )
