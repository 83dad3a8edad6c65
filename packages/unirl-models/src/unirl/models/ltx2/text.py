"""Text of LTX-2: all hidden states of Gemma 3, joined by the connectors to what video and audio read.

Equal to LTX2Pipeline.encode_prompt and its connectors of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition


class LTX2TextEncoders(TextEncoders):
    """Features of the video stream and of the audio stream side by side, [B, L, Dv + Da].

    Padding stands before the text, as Gemma takes conversations; the connectors put learned registers in its place, so
    every token counts and the length is a multiple of theirs.
    """

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        # One at a time: the states of all 49 layers of Gemma 3 12B are 0.4 GB per text in bfloat16.
        return TextEmbedCondition.concat([self._encode_one(text, max_sequence_length) for text in texts])

    def _encode_one(self, text: str, max_sequence_length: int) -> TextEmbedCondition:
        encoder, connectors = self.encoders["text_encoder"], self.encoders["connectors"]
        self.tokenizers["tokenizer"].padding_side = "left"
        tokens = self.tokens([text.strip()], max_sequence_length)
        out = encoder(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False
        )
        states = torch.stack(out.hidden_states, dim=-1).flatten(2, 3).to(connectors.dtype)
        video, audio, mask = connectors(states, tokens.attention_mask, padding_side="left")
        return TextEmbedCondition(embeds=torch.cat([video, audio], dim=-1), attention_mask=mask)
