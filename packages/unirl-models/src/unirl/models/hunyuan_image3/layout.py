"""Sequences of words and images: where each token stands.

Every token counts as one position on two axes. Words stand at their place on both; the tokens of an image lie in a grid
around the middle of the places that they take. Words see what is before them, tokens of an image the whole image too.
An image that is given stands twice in one such block, as latents and as the vision tower sees it, with a word between.
Legend: N tokens of all rows, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.packed.rows import PackedRows

Grid = tuple[int, int]
"""Rows and columns of tokens."""


@dataclass(frozen=True)
class Segment:
    """A part of a row."""

    length: int
    grids: tuple[Grid, ...] = ()
    """Grids of its images, with one word between two; none for words. Tokens beyond them are padding."""

    @property
    def is_causal(self) -> bool:
        return not self.grids

    @property
    def num_positions(self) -> int:
        return self.length


@dataclass(frozen=True, eq=False)
class Layout(PackedRows):
    """R rows of new segments after their contexts. positions: int64 [N, 2], row and column."""

    @staticmethod
    def positions_of(row: Sequence[Segment], start: int) -> Tensor:
        """int64 [n, 2], the positions of the tokens of a row whose first one is the row's number `start`."""
        parts = []
        for segment in row:
            if segment.is_causal:
                parts.append(_of_words(start, segment.length))
            place, end = start, start + segment.length
            for number, (rows, columns) in enumerate(segment.grids):
                if number:
                    parts.append(_of_words(place, 1))
                    place += 1
                parts.append(_of_grid(place, rows, columns))
                place += rows * columns
            if segment.grids and place < end:
                parts.append(_of_words(place, end - place))
            start = end
        return torch.cat(parts)


def _of_words(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length)[:, None].expand(-1, 2)


def _of_grid(start: int, rows: int, columns: int) -> Tensor:
    """Halves are cut off, as in the published code."""
    top, left = start + (rows * columns - rows) // 2, start + (rows * columns - columns) // 2
    return torch.cartesian_prod(torch.arange(top, top + rows), torch.arange(left, left + columns))
