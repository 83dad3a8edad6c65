"""Text of Wan: the last hidden state of UMT5 over a cleaned prompt.

Equal to WanPipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition

with from_extra("diffusers"):
    import ftfy


class WanTextEncoders(TextEncoders):
    """Ragged texts with a mask. The transformer reads them padded with zeros to the full length, see `WanAdapter`."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        tokens = self.tokens([cleaned(text) for text in texts], max_sequence_length)
        hidden = self.encoders["text_encoder"](tokens.input_ids, tokens.attention_mask).last_hidden_state
        counts = tokens.attention_mask.sum(1).tolist()
        return ragged([row[:count] for row, count in zip(hidden, counts, strict=True)])


def cleaned(text: str) -> str:
    """A prompt with its encoding mended, HTML entities resolved (twice, as published) and runs of space as one."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()
