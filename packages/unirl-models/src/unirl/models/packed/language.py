"""What a decoder over packed rows needs to be called as `unirl.models.ar` calls language models of transformers.

Legend: B rows, T tokens of a row, N tokens of all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.models.packed.layers import Outputs
from unirl.models.packed.rows import KeyValues, PackedRows, Prefix
from unirl.models.packing import Packing


class TextCache:
    """Keys and values of the rows that are being written."""

    def __init__(self) -> None:
        self.known: KeyValues | None = None
        self.prefixes: tuple[Prefix, ...] | None = None
        """The context of each row; None before the first forward."""

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep these rows, repeats allowed. Nothing is copied before the next forward."""
        if self.prefixes is not None:
            self.prefixes = tuple(self.prefixes[row] for row in rows.tolist())


@dataclass(frozen=True)
class LanguageOutput:
    """What a language model of transformers returns, as far as it is read."""

    logits: Any  # Any: logits, or what the scoring head gives in their place


class PackedLanguage(ABC):
    """Words, and images between them, through a decoder over packed rows."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TextCache | None = None,
        logits_to_keep: int = 0,
        **inputs: Tensor,
    ) -> LanguageOutput:
        """Logits [1, N, vocabulary] of packed rows, or [B, 1, vocabulary] of the last token of padded ones.

        input_ids: int64 [1, N] with `packing`, else [B, T] padded on the left as `attention_mask` [B, >= T] says in its
        last columns. position_ids: not read, positions follow from images and cache. inputs: see `run`.
        """
        del position_ids, logits_to_keep
        is_packed = packing is not None
        cache = past_key_values if use_cache else None
        rows = rows_of(input_ids, packing, attention_mask)
        out, layout = self.run(rows, cache or TextCache(), inputs, needs_all=is_packed, keeps_keys=cache is not None)
        if cache is not None and out.layers is not None:
            cache.known = layout.extended(cache.known, out.layers)
            cache.prefixes = cache.known.prefixes
        logits: Any = out.logits  # Any: logits, or what the scoring head gives in their place
        return LanguageOutput(logits if is_packed else logits.transpose(0, 1))

    @abstractmethod
    def run(
        self,
        rows: list[Tensor],
        cache: TextCache,
        inputs: Mapping[str, Tensor],
        *,
        needs_all: bool,
        keeps_keys: bool,
    ) -> tuple[Outputs, PackedRows]:
        """One forward of rows after what the cache knows, with logits of all tokens or of the last one of each row; and
        where the tokens stand. inputs: the images between the words, and what else a model takes."""


def rows_of(input_ids: Tensor, packing: Packing | None, attention_mask: Tensor | None) -> list[Tensor]:
    """The tokens of each row.

    input_ids: int64 [1, N] with `packing`, else [B, T], padded on the left as `attention_mask` [B, >= T] says in its
        last columns.
    """
    if packing is not None:
        return list(input_ids[0].split(list(packing.lengths)))
    if attention_mask is None:
        return list(input_ids)
    counts = attention_mask[:, -input_ids.shape[1] :].bool()
    return [row[count] for row, count in zip(input_ids, counts, strict=True)]
