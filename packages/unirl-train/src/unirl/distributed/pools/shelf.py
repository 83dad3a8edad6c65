"""Values in a store that outlives the workers which made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from unirl.distributed.dispatch import HeldKey
from unirl.distributed.held import Held
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.storage import load_rollout, save_rollout


class Store(Protocol):
    """Keeps what workers made where it outlives them. Files are written and read in this process, unless a store does
    better."""

    def put(self, value: RolloutResp) -> Any:  # Any: the store's own
        """Keep a value of this process."""
        ...

    def get(self, stored: Any) -> RolloutResp:  # Any: the store's own
        """The value in this process."""
        ...

    def rows(self, stored: Any, rows: Sequence[int]) -> Any:  # Any: the store's own, see `Runtime.pick_rows`
        """Some samples, for workers of other groups that assemble a new value."""
        ...

    def joined(self, picked: Sequence[Any]) -> Any:  # Any: what `Runtime.pick_rows` of other groups gives
        """Rows of other groups as one argument of a member."""
        ...

    def write(self, stored: Sequence[Any], paths: Sequence[Path]) -> None:  # Any: the store's own
        """Write each value to a file. Raises ContractError for what no file can hold."""
        for each, path in zip(stored, paths, strict=True):
            save_rollout(path, self.get(each))

    def read(self, paths: Sequence[Path]) -> list[tuple[RolloutResp, Any]]:  # Any: the store's own
        """(metadata, stored value) of each file that `write` wrote. Raises as `load_rollout` of unirl.types.storage."""
        found = [load_rollout(path)[0] for path in paths]
        return [(value.metadata_only(), self.put(value)) for value in found]


class Shelf:
    """Held values in a store, by key, each in pieces. Implements Holder."""

    is_closed = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stored: dict[HeldKey, list[Any]] = {}  # Any: the store's own

    def keep(self, key: HeldKey, pieces: list[Any]) -> None:  # Any: the store's own
        """Keep a value that the store already has."""
        self._stored[key] = pieces

    def landing(self, held: Held) -> Held:
        """A value that workers hold, as rows of which their runtime gives references of this store; they forget it."""
        whole = [(shard, held.key, tuple(range(meta.batch_size))) for shard, meta in enumerate(held.metas)]
        self.keep(held.key, held.runtime.pick_rows(whole))
        held.release()
        landed = Held(self, held.key, list(held.metas))
        landed.is_landed = True
        return landed

    def pick_rows(self, calls: Sequence[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:  # Any: see Runtime
        return [self._store.rows(self._stored[key][shard], rows) for shard, key, rows in calls]

    def map_held(
        self, key: HeldKey, function: Callable[..., Any], shard_args: Sequence[tuple[Any, ...]]
    ) -> list[Any]:  # Any: what the function gives
        """See Runtime. The rare way: no worker holds stored values, so they are fetched and kept anew."""
        results = []
        for shard, args in enumerate(shard_args):
            value = self._store.get(self._stored[key][shard])
            results.append(function(value, *args))
            self._stored[key][shard] = self._store.put(value)
        return results

    def write(self, key: HeldKey, paths: Sequence[Path]) -> None:
        self._store.write(self._stored[key], paths)

    def read(self, key: HeldKey, paths: Sequence[Path]) -> Held:
        """A value that was written, under a new key."""
        found = self._store.read(paths)
        self.keep(key, [stored for _, stored in found])
        held = Held(self, key, [meta for meta, _ in found])
        held.is_landed = True
        return held

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """Not of a store: the workers that train gather."""
        raise ContractError("a store assembles nothing; gather where it is trained on")

    def landed(self, held: Held) -> Held:
        """Itself."""
        return held

    def release(self, key: HeldKey) -> None:
        """Forget a value."""
        self._stored.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._stored.clear()

    def __len__(self) -> int:
        """Number of values."""
        return len(self._stored)
