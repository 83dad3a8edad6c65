"""Text of Stable Diffusion 3: two CLIP encoders side by side, T5 after them, both pooled vectors end to end.

    embeds = cat over tokens (pad (cat over width (clip[-2], clip_2[-2])), t5)      [B, 77 + max_sequence_length, D]
    pooled = cat (clip.text_embeds, clip_2.text_embeds)                               [B, P]

Equal to StableDiffusion3Pipeline.encode_prompt of diffusers, bit for bit on the same batch. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition

with from_extra("diffusers"):
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class SD3TextEncoders(TextEncoders):
    """Two CLIP encoders and T5, which may be absent; its part of the sequence is zeros then.

    width: D of the joint attention, to which the CLIP part is padded.
    """

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
        *,
        width: int,
    ) -> None:
        super().__init__(encoders, tokenizers)
        self.width = width

    def token_limits(self, max_sequence_length: int) -> dict[str, int]:
        """CLIP's own length, and for T5 the one that is asked for."""
        clip = self.tokenizers["tokenizer"].model_max_length
        return {"": clip, "_2": clip, "_3": max_sequence_length}

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        hidden, pooled = self._encode_clip(texts, "")
        hidden_2, pooled_2 = self._encode_clip(texts, "_2")
        clip = torch.cat([hidden, hidden_2], dim=-1)
        t5 = self._encode_t5(texts, max_sequence_length, like=clip)
        clip = nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return TextEmbedCondition(embeds=torch.cat([clip, t5], dim=-2), pooled=torch.cat([pooled, pooled_2], dim=-1))

    def _encode_clip(self, texts: Sequence[str], suffix: str) -> tuple[Tensor, Tensor]:
        encoder = self.encoders[f"text_encoder{suffix}"]
        # Both CLIP encoders read the length of the first tokenizer, as diffusers does.
        ids = self.tokens(texts, self.tokenizers["tokenizer"].model_max_length, suffix=suffix).input_ids
        out = encoder(ids, output_hidden_states=True)
        return out.hidden_states[-2].to(encoder.dtype), out.text_embeds

    def _encode_t5(self, texts: Sequence[str], max_sequence_length: int, *, like: Tensor) -> Tensor:
        encoder = self.encoders.get("text_encoder_3")
        if encoder is None:
            return like.new_zeros(len(texts), max_sequence_length, self.width)
        ids = self.tokens(texts, max_sequence_length, suffix="_3").input_ids
        return encoder(ids)[0].to(encoder.dtype)
