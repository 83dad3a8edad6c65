"""Rows of different shapes in one velocity: a forward per group of rows that fit together. Shape letters: see
`unirl.models`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from unirl.models.experts import AnyRank
from unirl.types.batch import rows_by


def in_groups(
    keys: Sequence[Hashable], forward: Callable[[list[int]], Tensor], any_rank: AnyRank | None = None
) -> Tensor:
    """forward(rows) -> [r, ...] of every group of rows of equal keys, put back in the order of the rows [R, ...].

    Rows of one key, the common case, are one forward of all of them.
    any_rank: None where the weights lie whole on this rank. Where they are sharded, every rank takes as many forwards
        as the one with the most groups: one with fewer runs its first row again and adds nothing of it, so that
        gathering the shards and summing their gradients meets its like on every rank. A collective per forward.
    """
    groups = rows_by(keys)
    order = [row for rows in groups.values() for row in rows]
    parts = [_taken(forward, rows, any_rank) for rows in groups.values()]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(order).argsort().to(parts[0].device)]
    while any_rank is not None and any_rank(False):
        out = out + 0.0 * forward([0]).sum()
    return out


def _taken(forward: Callable[[list[int]], Tensor], rows: list[int], any_rank: AnyRank | None) -> Tensor:
    if any_rank is not None:
        any_rank(True)
    return forward(rows)
