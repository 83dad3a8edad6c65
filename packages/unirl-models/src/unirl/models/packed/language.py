"""What a decoder over packed rows needs to be called as `unirl.models.ar` calls language models of transformers.

Legend: B rows, T tokens of a row, N tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.models.packed.rows import KeyValues, Prefix
from unirl.models.packing import Packing


class TextCache:
    """Keys and values of the rows that are being written."""

    def __init__(self) -> None:
        self.known: KeyValues | None = None
        self.prefixes: tuple[Prefix, ...] | None = None
        """The context of each row; None before the first forward."""

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep these rows, repeats allowed. Nothing is copied before the next forward."""
        if self.prefixes is not None:
            self.prefixes = tuple(self.prefixes[row] for row in rows.tolist())


@dataclass(frozen=True)
class LanguageOutput:
    """What a language model of transformers returns, as far as it is read."""

    logits: Any  # Any: logits, or what the scoring head gives in their place


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
