"""Text of HunyuanVideo 1.5: a hidden state of Qwen2.5-VL over a fixed request for a description, and ByT5's of
the words that stand between quotation marks.

Equal to HunyuanVideo15Pipeline.encode_prompt of diffusers, but for the padding, which is left out. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unirl.models.diffusers_pipeline.glyphs import GlyphTextEncoders
from unirl.models.diffusers_pipeline.text import language_states
from unirl.types.conditions import TextEmbedCondition

# The model was trained with eight spaces before every number.
SYSTEM_PROMPT = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:"
    "         1. The main content and theme of the video."
    "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "         4. background environment, light, style and atmosphere."
    "         5. camera angles, movements, and transitions used in the video."
)
TEMPLATE_TOKENS = 108
"""Tokens of the conversation before the prompt, which are cut off. A fixed number, as in the published pipeline."""
HIDDEN_STATE = -3
"""The transformer was trained on the states two layers below the last."""
_QUOTED = re.compile('"(.*?)"|\N{LEFT DOUBLE QUOTATION MARK}(.*?)\N{RIGHT DOUBLE QUOTATION MARK}')


class HunyuanVideo15TextEncoders(GlyphTextEncoders):
    """Ragged texts with a mask in both slots."""

    max_glyph_tokens = 256

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        tokens = self.tokenizers["tokenizer"].apply_chat_template(
            [
                [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text or " "}]
                for text in texts
            ],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding=True,
            max_length=TEMPLATE_TOKENS + max_sequence_length,
            truncation=True,
            return_tensors="pt",
        )
        return language_states(self.encoders["text_encoder"], tokens, layer=HIDDEN_STATE, start=TEMPLATE_TOKENS)

    def words_to_draw(self, prompt: str) -> list[str]:
        return quoted(prompt)


def quoted(prompt: str) -> list[str]:
    """What stands between double quotation marks, straight or curly, once each and in order."""
    return list(dict.fromkeys(straight or curly for straight, curly in _QUOTED.findall(prompt)))
