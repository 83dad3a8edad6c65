"""Text of HunyuanVideo: a hidden state of Llama over a fixed request for a description, and CLIP's pooled vector.

Equal to HunyuanVideoPipeline.encode_prompt of diffusers, but for the padding, which is left out. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.diffusers_pipeline.text import TextEncoders, language_states
from unirl.types.conditions import TextEmbedCondition

TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
TEMPLATE_TOKENS = 95
"""Tokens of the template before the prompt, which are cut off. A fixed number, as in the published pipeline."""
HIDDEN_STATE = -3
"""The transformer was trained on the states two layers below the last."""
CLIP_TOKENS = 77


class HunyuanVideoTextEncoders(TextEncoders):
    """Ragged texts with a mask: the tokens of the prompt and of the template's end; pooled of CLIP."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        requests = [TEMPLATE.format(text) for text in texts]
        tokens = self.tokens(requests, TEMPLATE_TOKENS + max_sequence_length, padding="longest")
        text = language_states(self.encoders["text_encoder"], tokens, layer=HIDDEN_STATE, start=TEMPLATE_TOKENS)
        return text.replace(pooled=self.pooled(texts))

    def pooled(self, texts: Sequence[str]) -> Tensor:
        """[B, D] of CLIP."""
        ids = self.tokens(texts, CLIP_TOKENS, suffix="_2").input_ids
        return self.encoders["text_encoder_2"](ids).pooler_output
