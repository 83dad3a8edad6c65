"""Janus-Pro (arXiv 2501.17811) of transformers as a causal language model of images.

Legend: B samples, T positions, D width of the hidden states, L tokens of an image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.extras import from_extra

with from_extra("transformers"):
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast


# Exports name the class of the model, and stock transformers knows it by this name.
class JanusForConditionalGeneration(transformers.JanusForConditionalGeneration):
    """Reads words and, by numbers from `first_code` on, the codes of an image; its logits are of codes.

    Names and values of its state are those of transformers' class.
    """

    _supports_attention_backend = True

    @property
    def first_code(self) -> int:
        """What code 0 is read as."""
        return self.model.language_model.get_input_embeddings().num_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The projection onto the codes."""
        return self.model.generation_head.vision_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the projection onto the codes."""
        self.model.generation_head.vision_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,  # Any: a cache of transformers
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        drawn: Tensor | None = None,
        **kwargs: Any,  # Any: what layers take
    ) -> Any:  # Any: an output of transformers, or pixels
        """Logits of codes after each of the last `logits_to_keep` positions (0: all) of `input_ids` [B, T].

        drawn: int64 [B, L], codes of whole images; their pixels [B, 3, H, W] in [-1, 1] are returned instead. In this
        forward, since hooks around it gather the weights of a model that is sharded.
        """
        if drawn is not None:
            return self.model.vqmodel.decode(drawn)
        out = self.model.language_model(
            inputs_embeds=self._embedded(input_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = out.last_hidden_state[:, -logits_to_keep if logits_to_keep else 0 :]
        return CausalLMOutputWithPast(logits=self.model.generation_head(hidden), past_key_values=out.past_key_values)

    def _embedded(self, ids: Any) -> Tensor:  # Any: annotated as optional above, as transformers has it
        """[B, T, D]. Both kinds at every position, so that all ranks have gradients of the same weights."""
        is_code = ids >= self.first_code
        words = self.model.language_model.get_input_embeddings()(ids.masked_fill(is_code, 0))
        codes = self.prepare_embeddings_for_image_generation((ids - self.first_code).clamp(min=0))
        return torch.where(is_code[..., None], codes.to(words.dtype), words)
