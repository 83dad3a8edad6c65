"""Text of FLUX.2 Klein: three hidden states of Qwen3 end to end, padding included.

Equal to Flux2KleinPipeline.encode_prompt of diffusers. The transformer attends to the padding too, so the number of
tokens is part of what the model sees. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unirl.models.diffusers_pipeline.text import TextEncoders, user_turns
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

READ_LAYERS = (9, 18, 27)
"""Hidden states that the transformer reads; 0 is the embedding."""


class Flux2KleinTextEncoders(TextEncoders):
    """Texts of exactly `max_sequence_length` tokens, [B, L, 3 D], without a mask."""

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
    ) -> None:
        super().__init__(encoders, tokenizers)
        num_layers = self.encoders["text_encoder"].config.num_hidden_layers
        if num_layers < READ_LAYERS[-1]:
            raise ConfigError(
                f"text_encoder has {num_layers} layers; FLUX.2 Klein reads its hidden states {READ_LAYERS}. Use a "
                "complete Flux2KleinPipeline folder."
            )

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        turns = user_turns(self.tokenizers["tokenizer"], texts, enable_thinking=False)
        tokens = self.tokens(turns, max_sequence_length)
        # The body alone: the logits of 150,000 words are not read.
        hidden = (
            self.encoders["text_encoder"]
            .model(
                input_ids=tokens.input_ids,
                attention_mask=tokens.attention_mask,
                output_hidden_states=True,
                use_cache=False,
            )
            .hidden_states
        )
        return TextEmbedCondition(embeds=torch.cat([hidden[layer] for layer in READ_LAYERS], dim=-1))
