"""Ray's object store as what keeps samples of workers that may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.distributed.group.framework import ray_module
from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.worker import Openable
from unirl.types.rollout import RolloutResp


@dataclass(frozen=True)
class StoredRows:
    """Samples in Ray's object store, which a worker fetches from there. Implements Openable."""

    pieces: tuple[tuple[Any, tuple[int, ...] | None], ...]  # Any: Ray's references
    """Reference of a response, and which of its samples; None: all."""

    def opened(self, kept: dict[str, Any]) -> RolloutResp:  # Any: see Openable
        """The samples in this process."""
        found = ray_module().get([reference for reference, _ in self.pieces])
        values = [value.opened(kept) if isinstance(value, Openable) else value for value in found]
        parts = [
            value if rows is None else value.select(rows) for value, (_, rows) in zip(values, self.pieces, strict=True)
        ]
        return parts[0] if len(parts) == 1 else RolloutResp.concat([outgoing(part) for part in parts])


class ObjectStore:
    """What members made, as objects of the driver: they outlive the worker that made them. Implements Store."""

    def put(self, value: RolloutResp) -> Any:  # Any: Ray's reference
        return ray_module().put(outgoing(value))

    def get(self, stored: Any) -> RolloutResp:  # Any: Ray's reference
        return ray_module().get(stored)

    def rows(self, stored: Any, rows: Sequence[int]) -> StoredRows:  # Any: Ray's reference
        return StoredRows(((stored, tuple(rows)),))

    def joined(self, picked: Sequence[Any]) -> StoredRows:  # Any: Ray's references, or StoredRows of another pool
        pieces: list[tuple[Any, tuple[int, ...] | None]] = []
        for each in picked:
            pieces += each.pieces if isinstance(each, StoredRows) else [(each, None)]
        return StoredRows(tuple(pieces))
