"""What the shards of a new held value are made of: rows that lie there already, and rows of other workers."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.distributed.exchange import Piece, plan_shards
from unirl.distributed.held import Held, Holder
from unirl.distributed.worker import OwnRows
from unirl.types.errors import ContractError

Sources = Sequence[tuple[Held, Sequence[int]]]
"""(value, rows) of a new held value, in order."""


@dataclass(frozen=True)
class NewShard:
    """One shard of a new held value, as `Worker.assemble` joins it."""

    own: list[OwnRows | None]
    """Its pieces: rows that the worker holds itself; None for those that arrive."""
    order: tuple[int, ...] | None
    """The requested order, as positions in the joined pieces; None if they are already in that order."""
    arrived: list[Any]  # Any: see `Holder.pick_rows`
    """The rows of other workers, or references to them, in the order of the pieces."""


def new_shards(sources: Sources, holder: Holder, num_shards: int) -> list[NewShard]:
    """The shards of a new value that `holder` will hold. Workers that hold other rows are asked for them here.

    Raises ContractError if a sample is chosen twice or does not exist, a source was released, or the samples do not
    divide over the shards.
    """
    keys = [held.key_for(held.runtime) for held, _ in sources]
    plans = plan_shards([([meta.batch_size for meta in held.metas], rows) for held, rows in sources], num_shards)
    _check_chosen_once(sources)
    own = [
        [
            OwnRows(keys[piece.source], piece.rows)
            if piece.shard == shard and sources[piece.source][0].runtime is holder
            else None
            for piece in plan.pieces
        ]
        for shard, plan in enumerate(plans)
    ]
    moving = [
        (shard, piece)
        for shard, plan in enumerate(plans)
        for piece, rows in zip(plan.pieces, own[shard], strict=True)
        if rows is None
    ]
    arrived: list[list[Any]] = [[] for _ in plans]  # Any: see `Holder.pick_rows`
    for (shard, _), rows in zip(moving, _picked([piece for _, piece in moving], sources), strict=True):
        arrived[shard].append(rows)
    return [NewShard(own[shard], plan.order, arrived[shard]) for shard, plan in enumerate(plans)]


def _picked(pieces: Sequence[Piece], sources: Sources) -> list[Any]:  # Any: see `Holder.pick_rows`
    """The rows of each piece, or references to them, from the workers that hold them."""
    found: dict[int, Any] = {}  # Any: see `Holder.pick_rows`
    for runtime in dict.fromkeys(held.runtime for held, _ in sources):
        places = [place for place, piece in enumerate(pieces) if sources[piece.source][0].runtime is runtime]
        calls = [(pieces[i].shard, sources[pieces[i].source][0].key, pieces[i].rows) for i in places]
        if calls:
            found.update(zip(places, runtime.pick_rows(calls), strict=True))
    return [found[place] for place in range(len(pieces))]


def _check_chosen_once(sources: Sources) -> None:
    chosen: collections.Counter[str] = collections.Counter()
    for held, rows in sources:
        names = [name for meta in held.metas for name in meta.root_track().sample_ids]
        chosen.update(names[row] for row in rows)
    repeated = sorted(name for name, count in chosen.items() if count > 1)
    if repeated:
        raise ContractError(f"samples {repeated[:3]} are chosen more than once; every sample needs its own id")
