"""Pushes in which every rank sends the rows that it has, so that no rank gathers a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.distributed.weight_sync.plan import PlannedBucket, push_plan
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.transports.base import SlicingTransport
from unirl.types.errors import UniRLError, WeightSyncError
from unirl.types.protocols.training import Collectives, WeightSource
from unirl.types.weights import (
    SumKind,
    WeightReceipt,
    WeightSpec,
    joined_checksum,
    rounded,
    sum_kind,
    tensor_checksums,
)


class SlicePush:
    """Pushes through a transport that takes slices. Every training rank has one and makes the same calls.

    engines: on rank 0, which calls them; None on the others. dtype: in which floating weights are sent. max_bytes:
    largest bucket.
    """

    def __init__(
        self,
        source: WeightSource,
        ranks: Collectives,
        transport: SlicingTransport,
        rank: int,
        engines: RemoteEngines | None,
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._transport = transport
        self._rank = rank
        self._engines = engines
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._plan: tuple[PlannedBucket, ...] = ()
        self._failure: UniRLError | None = None

    def push(self, version: int, policy: str | None) -> tuple[WeightReceipt | None, list[WeightSpec]]:
        """Send a policy. Returns the engines' receipt on rank 0 (else None), and the specs of what was sent.

        If one rank fails it raises its own error, and all others raise WeightSyncError.
        """
        if not self._plan:
            own = self._source.shard_rows()
            ranks = self._ranks.gathered({name: rows for name, (_, _, *rows) in own.items()})
            shapes = {name: (shape, dtype) for name, (shape, dtype, *_) in own.items()}
            self._plan = push_plan(shapes, ranks, self._max_bytes, self._dtype)
        transport, engines, sent = self._transport, self._engines, list[WeightSpec]()
        transport.join(self._all(lambda: self._begun(version)))
        shards = self._source.shards(policy)
        for number, bucket in enumerate(self._plan):
            rows = {shard.name: rounded(shard.rows, self._dtype) for shard in (next(shards) for _ in bucket.names)}
            sums = self._all(lambda number=number, bucket=bucket, rows=rows: self._written(number, bucket, rows))
            specs = _specs(bucket, sums, sum_kind(transport.device))
            sent += specs
            if engines is not None:
                try:
                    engines.receive_parcel(number, transport.parcel(number, version, bucket, specs))
                except UniRLError as error:
                    self._failure = error  # the other ranks see it in the next exchange
            transport.depart(number)
        receipt: list[WeightReceipt] = []
        self._all(lambda: self._finished(version, policy, receipt))
        return (receipt[0] if receipt else None), sent

    def _begun(self, version: int) -> Any:  # Any: JSON
        if self._engines is not None:
            empty = {
                name: WeightSpec(name, shape, str(dtype), "")
                for bucket in self._plan
                for name, dtype, shape, *_ in bucket.layout.spans
            }
            self._engines.begin_weights(version, list(empty.values()))
        return self._transport.opened(self._rank)

    def _written(self, number: int, bucket: PlannedBucket, rows: Mapping[str, Tensor]) -> dict[str, str]:
        """Write this rank's pieces; returns tensor -> checksum."""
        if self._engines is not None:
            self._engines.make_way()
        self._transport.begin(number, bucket)
        kind = sum_kind(self._transport.device)
        own = [piece for piece in bucket.pieces if piece.rank == self._rank]
        # On the host a piece is written while it is in the cache; on a device few, large operations sum all.
        parts = [[piece] for piece in own] if kind == "xxh3_128" else [own]
        sums = {}
        for pieces in parts:
            placed = {piece.name: rows[piece.name].to(self._transport.device) for piece in pieces}
            sums.update(zip(placed, tensor_checksums(placed.values(), kind), strict=True))
            for piece in pieces:
                self._transport.write(number, bucket, piece, placed[piece.name])
        return sums

    def _finished(self, version: int, policy: str | None, receipt: list[WeightReceipt]) -> None:
        if self._engines is not None:
            receipt.append(self._engines.finish_weights(version, policy))
        self._transport.settle()

    def _all(self, work: Callable[[], Any]) -> list[Any]:  # Any: JSON
        """Results of `work` on every rank. Raises on all ranks if one fails."""
        failure, result = self._failure, None
        if failure is None:
            try:
                result = work()
            except UniRLError as error:
                failure = error
        self._failure = None
        told = self._ranks.gathered((result, None if failure is None else str(failure)))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
        if failed:
            self._transport.drop()
            if failure is not None:
                raise failure
            raise WeightSyncError(f"a push ended on another rank. {'; '.join(failed)}")
        return [result for result, _ in told]


def _specs(bucket: PlannedBucket, sums: Sequence[Mapping[str, str]], kind: SumKind) -> list[WeightSpec]:
    """The specs that the engines must find, from the checksums of all ranks, which are of this kind."""
    pieces, specs = bucket.pieces_by_name(), []
    for name, dtype, shape, *_ in bucket.layout.spans:
        own = [sums[piece.rank][name] for piece in pieces[name]]
        stops = tuple(piece.stop for piece in pieces[name]) if len(own) > 1 else ()
        specs.append(WeightSpec(name, shape, str(dtype), joined_checksum(own), stops, kind))
    return specs
