"""Plans which rows move where when samples of held values form a new held value. Pure functions, no transport."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unirl.distributed.dispatch import shard_bounds
from unirl.types.errors import ContractError


@dataclass(frozen=True)
class Piece:
    """Some rows of one shard of one source, in the requested order."""

    source: int
    """Index of the held value among the sources."""
    shard: int
    rows: tuple[int, ...]
    """Positions within the shard."""


@dataclass(frozen=True)
class ShardPlan:
    """The pieces of one new shard."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...] | None
    """The requested order, as positions in the joined pieces; None if they are already in that order."""


def plan_shards(sources: Sequence[tuple[Sequence[int], Sequence[int]]], num_shards: int) -> list[ShardPlan]:
    """Plans of `num_shards` equal shards from (shard sizes, requested rows) of each source, in order.

    Rows are numbered through all shards of a source. A new shard has at most one piece of each source shard, so every
    pair of workers exchanges one message. Raises ContractError if a row is outside its source, the rows do not divide
    over the shards, or there are none.
    """
    wanted: list[tuple[int, int, int]] = []  # source, shard, row
    for number, (sizes, rows) in enumerate(sources):
        starts = list(accumulate(sizes, initial=0))
        for row in rows:
            if not 0 <= row < starts[-1]:
                raise ContractError(f"row {row} of held value {number}, which has {starts[-1]} samples")
            shard = bisect_right(starts, row) - 1
            wanted.append((number, shard, row - starts[shard]))
    if not wanted:
        raise ContractError(f"no row of {len(sources)} held values is wanted; a new one needs at least one")
    return [_shard_plan(wanted[start:stop]) for start, stop in shard_bounds(len(wanted), num_shards, "the chosen part")]


def _shard_plan(wanted: Sequence[tuple[int, int, int]]) -> ShardPlan:
    rows: dict[tuple[int, int], list[int]] = {}
    within: list[tuple[tuple[int, int], int]] = []
    for source, shard, row in wanted:
        own = rows.setdefault((source, shard), [])
        within.append(((source, shard), len(own)))
        own.append(row)
    starts = dict(zip(rows, accumulate((len(own) for own in rows.values()), initial=0), strict=False))
    order = tuple(starts[piece] + place for piece, place in within)
    pieces = tuple(Piece(source, shard, tuple(own)) for (source, shard), own in rows.items())
    return ShardPlan(pieces, None if order == tuple(range(len(order))) else order)
