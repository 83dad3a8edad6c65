"""pi0 of transformers behind one forward: the prefix once, and the expert on noisy chunks over its keys and values.

Legend: n observations, R rows of the expert, P tokens of the prefix, W width of the features, H moves and D numbers of
a chain, S numbers of a padded state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.extras import from_extra

with from_extra("transformers"):
    import transformers


@dataclass(frozen=True)
class Prefix:
    """What the vision-language model made of n observations."""

    keys_values: Sequence[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [n, heads, P, size]."""
    mask: Tensor
    """[n, P] int64, 1 on tokens, 0 after the end of a text."""
    states: Tensor
    """[n, S], which the expert reads."""
    features: Tensor
    """[n, W] float32: the mean of the last hidden states of its tokens, and the state."""

    def cache(self, row_R: Tensor | None) -> Any:  # Any: of transformers
        """The keys and values of some rows, which a forward may add to."""
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(self.keys_values):
            if row_R is None:
                cache.update(keys, values, layer)
            else:
                cache.update(keys[row_R], values[row_R], layer)
        return cache


class PI0Network(nn.Module):
    """`forward` is the only entry, so that what wraps the module sees every use of it.

    policy: PI0ForConditionalGeneration. trains_vlm: whether gradients reach the vision-language model.
    """

    def __init__(self, policy: Any, *, trains_vlm: bool) -> None:  # Any: transformers types its models loosely
        super().__init__()
        self.policy = policy
        self.trains_vlm = trains_vlm

    def forward(
        self,
        pixels: Tensor | None = None,
        states: Tensor | None = None,
        prompts: Tensor | None = None,
        *,
        prefix: Prefix | None = None,
        row_R: Tensor | None = None,
        x: Tensor | None = None,
        sigma_R: Tensor | None = None,
    ) -> tuple[Prefix, Tensor | None]:
        """The prefix of observations, and the velocity [R, H, D] float32 of x, or None without x.

        pixels: [n, 3, h, w], of one camera, in [-1, 1]. states: [n, S]. prompts: [n, T] int64, -1 after their end.
        prefix: that of an earlier call, used instead of these. row_R: the observation of each row of x; None: row after
        row.
        """
        if prefix is None:
            assert pixels is not None and states is not None and prompts is not None  # noqa: S101 - one or the other
            with nullcontext() if self.trains_vlm else torch.no_grad():
                prefix = self._prefix(pixels, states, prompts)
        if x is None or sigma_R is None:
            return prefix, None
        states, mask = (each if row_R is None else each[row_R] for each in (prefix.states, prefix.mask))
        dtype = self.policy.action_out_proj.weight.dtype
        found = self.policy(
            state=states.to(dtype),
            noise=x.to(dtype),
            timestep=sigma_R,
            attention_mask=mask,
            past_key_values=prefix.cache(row_R),
        )
        return prefix, found.logits.float()

    def _prefix(self, pixels: Tensor, states: Tensor, prompts: Tensor) -> Prefix:
        """As transformers' own `embed_prefix` for a camera that is always there, whose tokens come first."""
        vlm = self.policy.model.vlm
        dtype = self.policy.action_out_proj.weight.dtype
        images = vlm.get_image_features(pixels.to(dtype)).pooler_output
        is_text = prompts >= 0
        texts = vlm.get_input_embeddings()(prompts.clamp(min=0))
        embedded = torch.cat([images.to(texts.dtype), texts], dim=1)
        mask = torch.cat([is_text.new_ones(images.shape[:2]), is_text], dim=1).long()
        read = vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(mask),
            use_cache=True,
        )
        weights = mask[:, :, None].float()
        mean = (read.last_hidden_state.float() * weights).sum(dim=1) / weights.sum(dim=1)
        layers = [(layer.keys, layer.values) for layer in read.past_key_values.layers]
        return Prefix(layers, mask, states, torch.cat([mean, states.float()], dim=1))
