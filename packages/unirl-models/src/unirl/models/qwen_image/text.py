"""Text of Qwen-Image: the last hidden state of Qwen2.5-VL over a fixed request for a description.

Equal to QwenImagePipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders, language_states
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
        requests = [TEMPLATE.format(text) for text in texts]
        tokens = self.tokens(requests, TEMPLATE_TOKENS + TOKENIZER_LIMIT, padding="longest")
        stop = TEMPLATE_TOKENS + max_sequence_length
        return language_states(self.encoders["text_encoder"], tokens, layer=-1, start=TEMPLATE_TOKENS, stop=stop)
