"""Text of Stable Diffusion XL: two CLIP encoders side by side, pooled by the second.

    embeds = cat over width (clip[-2], clip_2[-2])   [B, 77, D]        pooled = clip_2.text_embeds   [B, P]

Equal to StableDiffusionXLPipeline.encode_prompt of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition


class SDXLTextEncoders(TextEncoders):
    """Both encoders read the same text, each with its own tokenizer."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        hidden, pooled = [], None
        for suffix in ("", "_2"):
            ids = self.tokens(texts, max_sequence_length, suffix=suffix).input_ids
            out = self.encoders[f"text_encoder{suffix}"](ids, output_hidden_states=True)
            hidden.append(out.hidden_states[-2])
            pooled = out[0]  # the projected one of the second, which is the last
        return TextEmbedCondition(embeds=torch.cat(hidden, dim=-1), pooled=pooled)
