"""Rows of segments, packed end to end: what each token attends to.

A row is a list of segments after a context whose keys and values are known. A token sees its row's context and earlier
segments; of its own segment a causal one shows what is before it, any other all of it.
Legend: N tokens of all rows, M of all contexts, R rows, H query heads, G heads of keys and values, D width of a head.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from unirl.types.devices import has_ragged_attention
from unirl.types.errors import ContractError


class RowSegment(Protocol):
    """A part of a row."""

    @property
    def length(self) -> int:
        """Tokens."""
        ...

    @property
    def is_causal(self) -> bool:
        """True if a token sees only what is before it in the segment."""
        ...

    @property
    def num_positions(self) -> int:
        """By how much the position advances."""
        ...


@dataclass(frozen=True)
class Prefix:
    """A context of a row: the first `length` tokens of a row of `KeyValues`, after which `position` follows."""

    row: int = 0
    length: int = 0
    position: int = 0


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of rows, end to end: what later tokens attend to."""

    layers: list[tuple[Tensor, Tensor]]
    """Per layer keys and values [M, G, D]."""
    prefixes: tuple[Prefix, ...]
    """Each row, whole."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [prefix.length for prefix in self.prefixes]


class Span(NamedTuple):
    """A segment as attention sees it."""

    queries: range
    """Places among the N tokens."""
    keys: list[range]
    """Places among the M tokens of contexts followed by the N."""
    is_causal: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys)."""
        return len(self.queries), sum(map(len, self.keys))


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Queries and keys of segments that one call of attention takes."""

    queries: Tensor
    """int64, places among the N tokens."""
    keys: Tensor
    """int64, places among the M tokens of contexts followed by the N."""
    shapes: list[tuple[int, int]]
    """(queries, keys) of each segment."""
    is_causal: bool

    @cached_property
    def boundaries(self) -> tuple[Tensor, Tensor]:
        """int32 [segments + 1] each: where the queries and keys of segments begin and end."""
        sizes = torch.tensor([(0, 0), *self.shapes], dtype=torch.int32)
        queries, keys = sizes.cumsum(0, dtype=torch.int32).to(self.queries.device).T.contiguous()
        return queries, keys


@dataclass(frozen=True, eq=False)
class PackedRows(ABC):
    """R rows of new segments after their contexts."""

    rows: tuple[tuple[RowSegment, ...], ...]
    contexts: tuple[Prefix, ...]
    """One per row."""
    context_lengths: tuple[int, ...]
    """Tokens of each row of the `KeyValues` that `contexts` refers to; empty without any."""
    positions: Tensor
    """int64 [N], or [N, axes]."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[RowSegment]],
        device: torch.device,
        *,
        contexts: Sequence[Prefix] | None = None,
        known: KeyValues | None = None,
    ) -> Self:
        """Rows that follow prefixes of `known`; both None where rows begin anew.

        Raises ContractError for another number of contexts than rows.
        """
        prefixes = tuple(contexts) if contexts is not None else (Prefix(),) * len(rows)
        if len(prefixes) != len(rows):
            raise ContractError(f"{len(rows)} rows and {len(prefixes)} contexts: one per row")
        positions = [cls.positions_of(row, prefix.position) for row, prefix in zip(rows, prefixes, strict=True)]
        return cls(
            rows=tuple(tuple(row) for row in rows),
            contexts=prefixes,
            context_lengths=tuple(known.lengths) if known is not None else (),
            positions=torch.cat(positions).to(device),
        )

    @staticmethod
    @abstractmethod
    def positions_of(row: Sequence[Any], start: int) -> Tensor:  # Any: a model's own kind of RowSegment
        """int64 [n], or [n, axes], the position of each token of a row whose first one is `start`."""

    @property
    def lengths(self) -> list[int]:
        """New tokens of each row."""
        return [sum(segment.length for segment in row) for row in self.rows]

    @cached_property
    def last_places(self) -> Tensor:
        """int64 [R], place among the N tokens of the last one of each row."""
        return torch.tensor(self.lengths).cumsum(0).sub(1).to(self.positions.device)

    # Attention -------------------------------------------------------------------------------------------------------

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: tuple[Tensor, Tensor] | None) -> Tensor:
        """[N, H, D] of query [N, H, D], key and value [N, G, D], after a context's keys and values [M, G, D]."""
        is_ragged = has_ragged_attention(query.device, query.dtype)
        if context is not None:
            key, value = (torch.cat(pair) for pair in zip(context, (key, value), strict=True))
        calls, restore = self._ragged_calls if is_ragged else self._dense_calls
        run = _ragged if is_ragged else _dense
        outputs = [run(call, query, key, value) for call in calls]
        return torch.cat(outputs).index_select(0, restore)

    @cached_property
    def _ragged_calls(self) -> tuple[list[AttentionCall], Tensor]:
        """One call for words and one for images: kernels for segments of any lengths."""
        return self._calls(lambda span: span.is_causal)

    @cached_property
    def _dense_calls(self) -> tuple[list[AttentionCall], Tensor]:
        """A call for each shape of segments: float32, CPUs and some accelerators have no kernel for ragged ones."""
        return self._calls(lambda span: (span.shape, span.is_causal))

    def _calls(self, key_of: Callable[[Span], Hashable]) -> tuple[list[AttentionCall], Tensor]:
        """Segments grouped by key, and for each token its place in the joined outputs."""
        groups: dict[Hashable, list[Span]] = {}
        for span in self._spans():
            groups.setdefault(key_of(span), []).append(span)
        device = self.positions.device
        calls = [
            AttentionCall(
                queries=joined_ranges(span.queries for span in spans).to(device),
                keys=joined_ranges(keys for span in spans for keys in span.keys).to(device),
                shapes=[span.shape for span in spans],
                is_causal=spans[0].is_causal,
            )
            for spans in groups.values()
        ]
        return calls, torch.cat([call.queries for call in calls]).argsort()

    def _spans(self) -> list[Span]:
        starts = [0, *itertools.accumulate(self.context_lengths)]
        offset = starts[-1]
        spans, begin = [], 0
        for row, prefix in zip(self.rows, self.contexts, strict=True):
            before = starts[prefix.row] if prefix.length else 0
            place = begin
            for segment in row:
                end = place + segment.length
                keys = [range(before, before + prefix.length), range(offset + begin, offset + end)]
                spans.append(Span(range(place, end), keys, segment.is_causal))
                place = end
            begin = place
        return spans

    # Contexts of what follows ----------------------------------------------------------------------------------------

    def extended(self, known: KeyValues | None, layers: Sequence[tuple[Tensor, Tensor]]) -> KeyValues:
        """Contexts followed by the new tokens, row by row. layers: keys and values [N, G, D] of each layer."""
        prefixes = []
        for row, (segments, prefix) in enumerate(zip(self.rows, self.contexts, strict=True)):
            length = prefix.length + sum(segment.length for segment in segments)
            prefixes.append(Prefix(row, length, prefix.position + sum(each.num_positions for each in segments)))
        if known is None:
            return KeyValues(list(layers), tuple(prefixes))
        starts = [0, *itertools.accumulate(self.context_lengths)]
        begins = [0, *itertools.accumulate(self.lengths)]
        index = joined_ranges(
            places
            for row, prefix in enumerate(self.contexts)
            for places in (
                range(starts[prefix.row], starts[prefix.row] + prefix.length),
                range(starts[-1] + begins[row], starts[-1] + begins[row + 1]),
            )
        ).to(self.positions.device)
        joined = [
            (torch.cat([old_key, key]).index_select(0, index), torch.cat([old_value, value]).index_select(0, index))
            for (old_key, old_value), (key, value) in zip(known.layers, layers, strict=True)
        ]
        return KeyValues(joined, tuple(prefixes))


def joined_ranges(ranges: Iterable[range]) -> Tensor:
    """int64, the numbers of all ranges one after the other."""
    starts, lengths = (
        torch.tensor([(each.start, len(each)) for each in ranges], dtype=torch.int64).view(-1, 2).unbind(1)
    )
    places = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + (starts - places + lengths).repeat_interleave(lengths)


def _ragged(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[n, H, D] of the n queries of a call."""
    query_bounds, key_bounds = call.boundaries
    out = varlen_attn(
        query.index_select(0, call.queries),
        key.index_select(0, call.keys),
        value.index_select(0, call.keys),
        query_bounds,
        key_bounds,
        max(length for length, _ in call.shapes),
        max(length for _, length in call.shapes),
        window_size=(-1, 0) if call.is_causal else (-1, -1),
        enable_gqa=True,
    )
    return out  # ty: ignore[invalid-explicit-return] - a pair only where it is asked for


def _dense(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[n, H, D] of the n queries of a call, whose segments have one shape."""
    num_queries, num_keys = call.shapes[0]
    q = query.index_select(0, call.queries).unflatten(0, (-1, num_queries)).transpose(1, 2)
    k, v = (each.index_select(0, call.keys).unflatten(0, (-1, num_keys)).transpose(1, 2) for each in (key, value))
    mask = None
    if call.is_causal and 1 < num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=call.is_causal and num_queries == num_keys, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)
