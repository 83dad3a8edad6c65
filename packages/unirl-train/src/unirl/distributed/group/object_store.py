"""Ray's object store as what keeps samples of workers that may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.distributed.group.framework import ray_module
from unirl.distributed.pools.shelf import Store
from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.worker import Openable
from unirl.types.rollout import RolloutResp
from unirl.types.storage import load_rollout, save_rollout


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


class ObjectStore(Store):
    """What members made, as objects of the driver: they outlive the worker that made them. Files are written and read
    by tasks, without passing through the driver."""

    def put(self, value: RolloutResp) -> Any:  # Any: Ray's reference
        return ray_module().put(outgoing(value))

    def get(self, stored: Any) -> RolloutResp:  # Any: Ray's reference
        return ray_module().get(stored)

    def rows(self, stored: Any, rows: Sequence[int]) -> StoredRows:  # Any: Ray's reference
        return StoredRows(((stored, tuple(rows)),))

    def write(self, stored: Sequence[Any], paths: Sequence[Path]) -> None:  # Any: Ray's references, or StoredRows
        ray = ray_module()
        write = ray.remote(num_cpus=0)(_write)
        # Ray replaces references by their values only if they are direct arguments, on the node that has them.
        ray.get([write.remote(str(path), each) for each, path in zip(stored, paths, strict=True)])

    def read(self, paths: Sequence[Path]) -> list[tuple[RolloutResp, Any]]:  # Any: Ray's reference
        ray = ray_module()
        read = ray.remote(num_cpus=0, num_returns=2)(_read)
        found = [read.remote(str(path)) for path in paths]
        return list(zip(ray.get([meta for meta, _ in found]), [value for _, value in found], strict=True))

    def joined(self, picked: Sequence[Any]) -> StoredRows:  # Any: Ray's references, or StoredRows of another pool
        pieces: list[tuple[Any, tuple[int, ...] | None]] = []
        for each in picked:
            pieces += each.pieces if isinstance(each, StoredRows) else [(each, None)]
        return StoredRows(tuple(pieces))


def _write(path: str, value: Any) -> None:  # Any: a response, or what opens as one
    save_rollout(path, value.opened({}) if isinstance(value, Openable) else value)


def _read(path: str) -> tuple[RolloutResp, RolloutResp]:
    value = load_rollout(path)[0]
    return value.metadata_only(), outgoing(value)
