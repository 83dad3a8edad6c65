"""Text of MiniMax-H3: a hidden state of Qwen3-VL within its stack, of the words alone.

Equal to MiniMaxH3TextEncoderStep of diffusers. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, DataError

LAYER = 50
"""Layers whose output the transformer reads (`MiniMaxH3ModularPipeline.text_encoder_layer`)."""


class MiniMaxH3TextEncoders(TextEncoders):
    """Ragged texts with a mask. Words as they are: no template, no marks, and nothing is cut."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        del max_sequence_length
        return ragged([self._encode_one(text) for text in texts])

    def _encode_one(self, text: str) -> torch.Tensor:
        """[L, D]."""
        encoder = self.encoders["text_encoder"]
        ids = self.tokenizers["tokenizer"](text, add_special_tokens=False).input_ids
        if not ids:
            raise DataError(f"the prompt {text!r} has no words, and MiniMax-H3 reads nothing else. Take it out.")
        input_ids = torch.tensor([ids], device=encoder.device)
        return encoder(input_ids=input_ids, use_cache=False).last_hidden_state[0]

    def token_limits(self, max_sequence_length: int) -> dict[str, int]:
        """None: texts are read whole."""
        del max_sequence_length
        return {}


def read_part(encoders: Mapping[str, Any | None], where: str) -> dict[str, Any | None]:  # Any: of transformers
    """What is read of Qwen3-VL: `LAYER` layers of its language model, without the norm that ends it.

    The other layers, the vision tower and the head, a quarter of its weights, are let go. Raises ConfigError for a
    model with fewer layers.
    """
    encoder = encoders["text_encoder"]
    if encoder is None:
        return dict(encoders)
    language = encoder.model.language_model
    if len(language.layers) <= LAYER:
        raise ConfigError(
            f"the text encoder of {where} has {len(language.layers)} layers; MiniMax-H3 reads the output of layer "
            f"{LAYER}, before the last. Use the text encoder that it was released with."
        )
    del language.layers[LAYER:]
    language.norm = nn.Identity()
    return {**encoders, "text_encoder": language}
