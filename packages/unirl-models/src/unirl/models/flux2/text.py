"""Text of FLUX.2: hidden states of three layers of a language model end to end, padding included.

Equal to encode_prompt of diffusers' Flux2Pipeline (Mistral 3) and Flux2KleinPipeline (Qwen3). The transformer attends
to the padding too, so the number of tokens is part of what the model sees. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IMAGE_TOKEN = "[IMG]"
"""Stands for an image in a prompt of Mistral 3; the stock pipeline takes it out of texts."""


class LayersOfTextEncoder(TextEncoders):
    """Texts of exactly `max_sequence_length` tokens, [B, L, 3 D], without a mask."""

    read_layers: ClassVar[tuple[int, ...]]
    """Hidden states that the transformer reads; 0 is the embedding."""
    family: ClassVar[str]
    """For messages."""
    pipeline_class: ClassVar[str]
    """For messages: whose folder has such an encoder."""

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
    ) -> None:
        super().__init__(encoders, tokenizers)
        num_layers = self.encoders["text_encoder"].config.get_text_config().num_hidden_layers
        if num_layers < self.read_layers[-1]:
            raise ConfigError(
                f"text_encoder has {num_layers} layers; {self.family} reads its hidden states {self.read_layers}. Use "
                f"a complete {self.pipeline_class} folder."
            )

    def read(self, model: Any, turns: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """The layers that are read, of conversations in the words of the tokenizer.

        model: the encoder's body, Any of transformers: the logits of 150,000 words are not read.
        """
        begin = self.tokenizers["tokenizer"].bos_token
        is_marked = begin is not None and turns[0].startswith(begin)  # a template writes it, or leaves it out
        tokens = self.tokens(turns, max_sequence_length, add_special_tokens=not is_marked)
        hidden: Sequence[Tensor] = model(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return TextEmbedCondition(embeds=torch.cat([hidden[layer] for layer in self.read_layers], dim=-1))


class Flux2TextEncoders(LayersOfTextEncoder):
    """Mistral 3 over a system message and the prompt as the turn of a user."""

    read_layers = (10, 20, 30)
    family = "FLUX.2 dev"
    pipeline_class = "Flux2Pipeline"

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        conversations = [_conversation(text.replace(IMAGE_TOKEN, "")) for text in texts]
        tokenizer: Any = self.tokenizers["tokenizer"]  # Any: a template gives strings where nothing is tokenized
        turns = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=False)
        return self.read(self.encoders["text_encoder"].model.language_model, turns, max_sequence_length)


def _conversation(text: str) -> list[dict[str, Any]]:  # Any: a string or parts
    said = (("system", SYSTEM_MESSAGE), ("user", text))
    return [{"role": role, "content": [{"type": "text", "text": words}]} for role, words in said]
