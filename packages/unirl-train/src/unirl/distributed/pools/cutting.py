"""Cuts a call about a request into calls of whole groups of samples, which members of a served pool then share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.distributed.dispatch import num_samples
from unirl.distributed.exchange import plan_shards
from unirl.distributed.held import Held
from unirl.distributed.pools.dealt import Bounds
from unirl.distributed.pools.shelf import Store
from unirl.types.rollout import RolloutReq

CALLS_PER_MEMBER = 2
"""Calls that a request is cut into for each device of the pool, where the recipe does not say."""


@dataclass(frozen=True)
class Ask:
    """A call of a component of one member."""

    role: str
    method: str
    args: tuple[Any, ...] = ()  # Any: as the component's methods
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # Any: as args
    is_stored: bool = False
    """True: the answer is the metadata of the result, and the result as the pool's `Store` keeps it."""


class RequestCutter:
    """Cuts calls the same way whoever lives.

    store: of the pool; held arguments are put there in the cuts. rows_per_call: samples of one call at least; None:
    two calls for each of `num_devices`.
    """

    def __init__(self, store: Store, rows_per_call: int | None, num_devices: int) -> None:
        self._store = store
        self._rows_per_call = rows_per_call
        self._num_devices = num_devices

    def bounds(self, request: RolloutReq) -> Bounds:
        """Rows of each call."""
        num_calls = self._num_devices * CALLS_PER_MEMBER
        return call_bounds(request.group_ids, self._rows_per_call or math.ceil(request.batch_size / num_calls))

    def asks(self, whole: Ask, bounds: Bounds) -> list[Ask]:
        """A call about all samples as one for each of `bounds`; arguments without samples go to each of them."""
        args = [self._cut(value, bounds) for value in whole.args]
        kwargs = {name: self._cut(value, bounds) for name, value in whole.kwargs.items()}
        return [
            dataclasses.replace(
                whole,
                args=tuple(column[call] for column in args),
                kwargs={name: column[call] for name, column in kwargs.items()},
            )
            for call in range(len(bounds))
        ]

    def _cut(self, value: Any, bounds: Bounds) -> list[Any]:  # Any: an argument of any kind
        """The argument of each call."""
        if isinstance(value, Held):
            return self._cut_held(value, bounds)
        if num_samples(value) is None:
            return [value] * len(bounds)
        return [value.slice(start, stop) for start, stop in bounds]

    def _cut_held(self, held: Held, bounds: Bounds) -> list[Any]:  # Any: see Store.joined
        key, sizes = held.key_for(held.runtime), [meta.batch_size for meta in held.metas]
        pieces = [
            [(piece.shard, key, piece.rows) for piece in plan_shards([(sizes, range(start, stop))], 1)[0].pieces]
            for start, stop in bounds
        ]
        picked = iter(held.runtime.pick_rows([piece for own in pieces for piece in own]))
        return [self._store.joined([next(picked) for _ in own]) for own in pieces]


def call_bounds(group_ids: Sequence[str], num_rows: int) -> list[tuple[int, int]]:
    """(start, stop) of calls of at least `num_rows` samples each but the last, that split no group of neighbours."""
    bounds, start = [], 0
    for row in range(1, len(group_ids) + 1):
        is_end = row == len(group_ids)
        if is_end or (row - start >= num_rows and group_ids[row] != group_ids[row - 1]):
            bounds.append((start, row))
            start = row
    return bounds
