"""The model and tokenizer of Janus-Pro."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from torch import nn

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.janus.model import JanusForConditionalGeneration
from unirl.models.token_scores import CHUNK_LOGITS
from unirl.types.bounds import PositiveInt, Seed, bounded
from unirl.types.errors import CheckpointError

TEMPLATE_FILE = "chat_template.json"
"""Where earlier versions of transformers kept the template of a processor."""


@bounded("bundle")
class JanusBundle(CausalLMBundle):
    """Janus-Pro in the layout of transformers (deepseek-community/Janus-Pro-1B, -7B), see `CausalLMBundle`.

    What trains is the language model with the generation's embeddings, aligner and head; LoRA adapts the language
    model. The vision tower, which sees given images, and the decoder of images keep their weights.
    """

    recipe_rules: ClassVar[str] = "unirl.models.janus.rules"
    family: ClassVar[str] = "Janus"
    draws_by_tokens: ClassVar[bool] = True
    spreads_tokens: ClassVar[bool] = False
    cuts_layers: ClassVar[bool] = False
    model_types: ClassVar[tuple[str, ...]] = ("janus",)
    auto_class: ClassVar[Any] = JanusForConditionalGeneration  # Any: see the base

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        chunk_logits: PositiveInt = CHUNK_LOGITS,
        random_weights: Seed | None = None,
        defers_weights: bool = False,
    ) -> None:
        super().__init__(
            pretrained_model,
            dtype,
            device,
            chunk_logits=chunk_logits,
            random_weights=random_weights,
            defers_weights=defers_weights,
        )
        inner = self.model.model
        for frozen in (inner.vision_model, inner.aligner, inner.vqmodel):
            frozen.requires_grad_(False)
        if self.model.lm_head.weight is not inner.language_model.get_input_embeddings().weight:
            self.model.lm_head.requires_grad_(False)
        # By their whole names, since layers of the vision tower end alike.
        self.lora_target_modules = tuple(
            name
            for name, layer in self.model.named_modules()
            if "language_model." in name and name.endswith(CausalLMBundle.lora_target_modules)
        )
        padding = self.model.generation_config.pad_token_id
        self.empty_token: int = self._id_of("pad_token") if padding is None else int(padding)
        """Stands for the words of an empty prompt."""
        self.first_token: int = self._id_of("bos_token")
        self.image_token: int = self._id_of("boi_token")
        """Ends a prompt: an image begins."""
        if self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = self._processor_template()
        side = self.model.config.vq_config.num_patches
        if side**2 != self.tokens_per_image:
            raise CheckpointError(
                f"{self.folder.path}: an image has vision_config.num_image_tokens = {self.tokens_per_image} tokens, "
                f"and its decoder takes {side} x {side}. Its configuration is of another model: fetch the folder again."
            )

    @property
    def tokens_per_image(self) -> int:
        """Codes of one image."""
        return int(self.model.config.vision_config.num_image_tokens)

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers of the language model. The vision tower is not run."""
        return tuple(sorted(self.model.model.language_model._no_split_modules or ()))

    @property
    def trained_module(self) -> nn.Module:
        return self.model

    def _words_read(self) -> int:
        return self.model.get_input_embeddings().num_embeddings

    def _set_attention(self, name: str) -> None:
        # The vision tower is not causal.
        self.model.set_attn_implementation({"text_config": name})

    def _id_of(self, name: str) -> int:
        """A special token of the tokenizer. Raises CheckpointError if it has none."""
        token = self.tokenizer.special_tokens_map.get(name)
        found = None if token is None else self.tokenizer.convert_tokens_to_ids(str(token))
        if not isinstance(found, int):
            raise CheckpointError(
                f"{self.folder.path}: the tokenizer has no {name}. Take a folder in the layout of transformers "
                "(deepseek-community/Janus-Pro-7B); those of deepseek-ai have another."
            )
        return found

    def _processor_template(self) -> str:
        """The chat template of the processor. Raises CheckpointError if there is none."""
        try:
            return json.loads((self.folder.path / TEMPLATE_FILE).read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.folder.path} has no chat template (chat_template.jinja or {TEMPLATE_FILE}): {error}"
            ) from error
