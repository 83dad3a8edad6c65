"""Text of HunyuanImage 2.1: a hidden state of Qwen2.5-VL over a fixed request for a description, and ByT5's of
the words that stand between quotation marks.

Equal to HunyuanImagePipeline.encode_prompt of diffusers, but for the padding, which is left out. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unirl.models.diffusers_pipeline.glyphs import GlyphTextEncoders
from unirl.models.diffusers_pipeline.text import language_states
from unirl.models.qwen_image.text import SYSTEM_PROMPT, TEMPLATE_TOKENS
from unirl.types.conditions import TextEmbedCondition

TEMPLATE = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>"
HIDDEN_STATE = -3
"""The transformer was trained on the states two layers below the last."""
# In the order in which the published pipeline looks for them.
_QUOTED = (
    "'(.*?)'",
    '"(.*?)"',
    "\N{LEFT SINGLE QUOTATION MARK}(.*?)\N{RIGHT SINGLE QUOTATION MARK}",
    "\N{LEFT DOUBLE QUOTATION MARK}(.*?)\N{RIGHT DOUBLE QUOTATION MARK}",
)


class HunyuanImageTextEncoders(GlyphTextEncoders):
    """Ragged texts with a mask in both slots."""

    max_glyph_tokens = 128

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        requests = [TEMPLATE.format(text) for text in texts]
        tokens = self.tokens(requests, TEMPLATE_TOKENS + max_sequence_length, padding="longest")
        return language_states(self.encoders["text_encoder"], tokens, layer=HIDDEN_STATE, start=TEMPLATE_TOKENS)

    def words_to_draw(self, prompt: str) -> list[str]:
        return quoted(prompt)


def quoted(prompt: str) -> list[str]:
    """What stands between quotation marks: single, double, and the curly ones of both kinds, one kind after another."""
    return [word for pattern in _QUOTED for word in re.findall(pattern, prompt)]
