"""Plans which rank sends which rows of which tensor in a push, and in which bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unirl.types.bucket_files import BucketLayout
from unirl.types.errors import WeightSyncError

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Full shape and dtype of each tensor."""
Rows = Mapping[str, Sequence[int]]
"""Tensor -> (first row, end) of the rows that a rank has."""


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a tensor, and the rank that sends them."""

    name: str
    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class PlannedBucket:
    """Tensors that are sent together, in pieces."""

    layout: BucketLayout
    pieces: tuple[Piece, ...]
    """Ordered by tensor as in the layout, then by row."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, in the order of the layout."""
        return tuple(name for name, *_ in self.layout.spans)

    def pieces_by_name(self) -> dict[str, list[Piece]]:
        """Tensor -> its pieces, ordered by row."""
        found: dict[str, list[Piece]] = {name: [] for name in self.names}
        for piece in self.pieces:
            found[piece.name].append(piece)
        return found


def push_plan(shapes: Shapes, ranks: Sequence[Rows], max_bytes: int, dtype: torch.dtype) -> tuple[PlannedBucket, ...]:
    """The buckets of a push, of at most `max_bytes` (a larger tensor gets its own bucket).

    ranks: rows of each rank; ranks with the same rows take turns. dtype: in which floating tensors are sent. Raises
    WeightSyncError if no rank has some rows, or ranges overlap.
    """
    buckets: list[PlannedBucket] = []
    current: dict[str, torch.Tensor] = {}
    size = 0
    for name, (shape, own) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype if own.is_floating_point else own, device="meta")
        if current and size + tensor.nbytes > max_bytes:
            buckets.append(_planned(current, ranks, len(buckets)))
            current, size = {}, 0
        current[name] = tensor
        size += tensor.nbytes
    return (*buckets, _planned(current, ranks, len(buckets))) if current else tuple(buckets)


def _planned(tensors: Mapping[str, torch.Tensor], ranks: Sequence[Rows], turn: int) -> PlannedBucket:
    layout = BucketLayout.of(tensors)
    pieces = [
        piece
        for at, (name, _, shape, *_) in enumerate(layout.spans)
        for piece in _pieces(name, shape[0] if shape else 1, ranks, turn + at)
    ]
    return PlannedBucket(layout, tuple(pieces))


def _pieces(name: str, num_rows: int, ranks: Sequence[Rows], turn: int) -> Iterator[Piece]:
    """The pieces of a tensor. turn: chooses among ranks with the same rows."""
    owners: dict[tuple[int, int], list[int]] = {}
    for rank, rows in enumerate(ranks):
        start, stop = rows[name]
        if stop > start or not num_rows:
            owners.setdefault((start, stop), []).append(rank)
    found = sorted(owners.items())
    if [0, *(stop for (_, stop), _ in found)] != [*(start for (start, _), _ in found), num_rows]:
        raise WeightSyncError(f"ranks have rows {[rows for rows, _ in found]} of the {num_rows} of {name}")
    for (start, stop), having in found:
        yield Piece(name, start, stop, having[turn % len(having)])
