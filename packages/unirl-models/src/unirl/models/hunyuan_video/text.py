"""Text of HunyuanVideo: a hidden state of Llama over a fixed request for a description, and CLIP's pooled vector.

Equal to HunyuanVideoPipeline.encode_prompt of diffusers, but for the padding, which is left out. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.diffusers_pipeline.text import TextEncoders, language_states
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition

with from_extra("diffusers"):
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

TEMPLATE = str(DEFAULT_PROMPT_TEMPLATE["template"])
TEMPLATE_TOKENS = int(DEFAULT_PROMPT_TEMPLATE["crop_start"])
"""Tokens of the template before the prompt, which are cut off. A fixed number."""
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
