"""Attention of a prefix of chunks, each to itself and those before it: one call of an ordinary kernel per chunk.

diffusers' own processor computes the same by flex attention, of a mask over the whole prefix, and without compilation
it holds every score. Shape letters: see `unirl.models`; L tokens, H heads, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.anyflow.chunks import Span
from unirl.models.extras import from_extra

with from_extra("diffusers"):
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers.transformer_anyflow_far import apply_rotary_emb


class ChunkAttention:
    """The processor of a block's self attention. What diffusers calls a mask is here the spans of the chunks."""

    # Names that diffusers' `set_attention_backend` looks for.
    _attention_backend: Any = None  # Any: a kernel of diffusers; None is torch's choice
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,  # Any: diffusers' AnyFlowAttention
        hidden_states: Tensor,
        *,
        attention_mask: Sequence[Span],
        rotary_emb: dict[str, Tensor],
    ) -> Tensor:
        """[R, L, width], of tokens [R, L, width]."""
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        # The norms may widen to float32.
        query, key = attn.norm_q(query).to(hidden_states.dtype), attn.norm_k(key).to(hidden_states.dtype)
        query, key, value = (each.unflatten(2, (attn.heads, -1)) for each in (query, key, value))
        query, key = (
            apply_rotary_emb(each.transpose(1, 2), rotary_emb[name]).transpose(1, 2)
            for name, each in (("query", query), ("key", key))
        )
        seen = [self._attend(query, key, value, span).flatten(2) for span in attention_mask]
        return attn.to_out[1](attn.to_out[0](torch.cat(seen, dim=1).to(hidden_states.dtype)))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        """[R, L, H, D] of the tokens of one chunk, of all queries, keys and values [R, L, H, D]."""
        start, end, num_zeros = span
        key, value = (
            torch.nn.functional.pad(each[:, :end], (0, 0, 0, 0, 0, num_zeros)) if num_zeros else each[:, :end]
            for each in (key, value)
        )
        return dispatch_attention_fn(
            query[:, start:end], key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
