"""Attention over packed samples: each attends to itself alone, and nothing is computed for padding or across samples.

Registered with transformers under `NAME`. A call with a `packing` holds samples end to end in one row and is cut at
their boundaries; any other call is transformers' own SDPA.
Legend: B samples, N positions of all samples, H heads, D width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from unirl.models.extras import from_extra
from unirl.models.packing import Packing
from unirl.types.devices import has_ragged_attention
from unirl.types.errors import ContractError
from unirl.types.protocols.models import TokenExchange

with from_extra("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

NAME = "unirl_packed_sdpa"

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers in which samples meet in the attention alone. Recurrent ones carry state from sample to sample."""


class Unpackable(ContractError):
    """A model asks its attention for what packed SDPA does not do."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # Any: keywords of transformers' own attention
) -> tuple[Tensor, None]:
    """Causal attention [1, N, H, D] of query [1, H, N, D] and key, value [1, H', N, D], sample by sample.

    packing: absent for padded batches. With an exchange, N are this rank's positions of the row: it attends with its
    heads of all of them, and other ranks with theirs. Source of the interface: transformers, `AttentionInterface`.
    Raises Unpackable for soft caps, sinks, biases and attention to the future, which transformers' SDPA ignores or does
    without packing alone.
    """
    if packing is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    beyond = sorted(name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None)
    if beyond or kwargs.get("is_causal") is False:
        raise Unpackable(f"packed attention is causal SDPA and knows nothing of {beyond or ['is_causal = False']}")
    lengths: list[int] | None = None
    if packing.exchange is not None:
        lengths = packing.exchange.lengths(sum(packing.lengths))
        query, key, value = _to_heads(query, key, value, packing.exchange, lengths)
        if packing.exchange.ring is not None:
            parts = packing.exchange.ring.lengths(lengths)
            masks = PackedBlocks(packing, parts, packing.exchange.ring.rank, sliding_window, query.device)
            if dropout:
                raise Unpackable(f"attention around a ring knows nothing of dropout = {dropout}. Set topology.ring: 1.")
            out = packing.exchange.ring.attention(query, key, value, lengths=parts, masks=masks, scale=scaling)
            return packing.exchange.to_tokens(out, lengths).transpose(1, 2), None
    if attention_mask is not None or query.shape[2] != key.shape[2] or query.shape[2] != sum(packing.lengths):
        raise ContractError(
            f"packed samples of {sum(packing.lengths)} positions lie in one row without mask and cache, got queries "
            f"{tuple(query.shape)}, keys {tuple(key.shape)} and {'a' if attention_mask is not None else 'no'} mask"
        )
    out = _ragged(query, key, value, packing, dropout, scaling, sliding_window)
    if packing.exchange is None or lengths is None:
        return out, None
    return packing.exchange.to_tokens(out.transpose(1, 2), lengths).transpose(1, 2), None


def _to_heads(
    query: Tensor, key: Tensor, value: Tensor, exchange: TokenExchange, lengths: Sequence[int]
) -> tuple[Tensor, ...]:
    """All positions of this rank's heads, for all heads of its positions.

    Raises Unpackable for values of another width. Where there are fewer heads of keys than ranks, each goes to all
    ranks whose queries ask it.
    """
    if value.shape[-1] != query.shape[-1]:
        raise Unpackable(
            f"topology.sp = {exchange.size} exchanges queries, keys and values together, and values of width "
            f"{value.shape[-1]} are not as wide as the queries' {query.shape[-1]}. Set topology.sp: 1."
        )
    if exchange.num_head_parts == 1:
        return query, key, value
    times = max(1, exchange.num_head_parts // key.shape[1])
    of_rank = [
        heads.unflatten(1, (exchange.num_head_parts, -1))
        for heads in (query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))
    ]
    own = exchange.to_heads(torch.cat(of_rank, 2).flatten(1, 2), lengths)
    return own.split([heads.shape[2] for heads in of_rank], 1)


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """Implements unirl.types.protocols.models.BlockMasks: a position attends to those before it of its own sample."""

    packing: Packing
    parts: Sequence[int]
    """Positions of each rank of the ring."""
    rank: int
    window: int | None
    """Positions that one attends to, itself with them; None for all."""
    device: torch.device

    def has_pairs(self, rank: int) -> bool:
        """True if that rank stands before this one, or is it, and a sample reaches from there to here."""
        if rank > self.rank or not self.parts[rank] or not self.parts[self.rank]:
            return False
        ends = itertools.accumulate(self.packing.lengths)
        last = self._first(rank) + self.parts[rank] - 1
        return next(end for end in ends if end > last) > self._first(self.rank)

    def mask(self, rank: int) -> Tensor:
        """bool [1, 1, n, n of that rank]"""
        queries, keys = self._positions(self.rank)[:, None], self._positions(rank)[None, :]
        ends = self.packing.boundaries[1:]
        same = torch.bucketize(queries, ends, right=True) == torch.bucketize(keys, ends, right=True)
        counts = same & (keys <= queries)
        if self.window is not None:
            counts &= queries - keys < self.window
        return counts[None, None]

    def _first(self, rank: int) -> int:
        return sum(self.parts[:rank])

    def _positions(self, rank: int) -> Tensor:
        return torch.arange(self._first(rank), self._first(rank) + self.parts[rank], device=self.device)


def _ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """`packed_attention` of all positions of some heads."""
    if has_ragged_attention(query.device, query.dtype) and dropout == 0.0:
        longest = max(packing.lengths)
        out = varlen_attn(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            packing.boundaries,
            packing.boundaries,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
        )
        return out[None]  # ty: ignore[invalid-argument-type] - a pair only where it is asked for
    # Float32, CPUs and some accelerators have no kernel for ragged rows: one call per run of samples of equal length.
    sizes = [samples * length for samples, length in packing.runs]
    parts = zip(*(tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)), strict=True)
    outputs = []
    for run, tensors in zip(packing.runs, parts, strict=True):
        q, k, v = (tensor.unflatten(0, run).transpose(1, 2) for tensor in tensors)  # [samples, H, length, D]
        window = _window(run[1], sliding_window, q.device)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            is_causal=window is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length] bool of a causal window; None where the window covers all."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:  # Any: see transformers
    """SDPA's own mask for padded batches; packed ones, which come without a padding mask, need none."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)
