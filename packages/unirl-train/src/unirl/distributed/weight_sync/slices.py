"""A push in which every rank sends the rows that it has: no rank gathers a whole tensor."""

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
from unirl.types.weights import WeightReceipt, WeightSpec, joined_checksum, rounded, tensor_checksum


class SlicePush:
    """Pushes by a transport that takes slices. Every rank of training has one, and calls it alike.

    engines: on the rank that speaks to them, which is the first; None on the others. dtype: floating weights are sent
    in it. max_bytes: most in one bucket.
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
        """Send a policy; the engines' receipt on the rank that speaks to them, and what was sent.

        Raises WeightSyncError on every rank where one fails; that one raises what it met.
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
            specs = _specs(bucket, sums)
            sent += specs
            if engines is not None:
                try:
                    engines.receive_parcel(number, transport.parcel(number, version, bucket, specs))
                except UniRLError as error:
                    self._failure = error  # the others learn of it in the next exchange
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
        """Write this rank's pieces; tensor -> checksum."""
        if self._engines is not None:
            self._engines.make_way()
        self._transport.begin(number, bucket)
        sums = {}
        for piece in bucket.pieces:
            if piece.rank == self._rank:
                sums[piece.name] = tensor_checksum(rows[piece.name])
                self._transport.write(number, bucket, piece, rows[piece.name])  # which the cache still has
        return sums

    def _finished(self, version: int, policy: str | None, receipt: list[WeightReceipt]) -> None:
        if self._engines is not None:
            receipt.append(self._engines.finish_weights(version, policy))
        self._transport.settle()

    def _all(self, work: Callable[[], Any]) -> list[Any]:  # Any: JSON
        """What every rank's work gives. Raises where one failed, on all of them."""
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


def _specs(bucket: PlannedBucket, sums: Sequence[Mapping[str, str]]) -> list[WeightSpec]:
    """What the engines must find, of what all ranks wrote."""
    pieces, specs = bucket.pieces_by_name(), []
    for name, dtype, shape, *_ in bucket.layout.spans:
        own = [sums[piece.rank][name] for piece in pieces[name]]
        stops = tuple(piece.stop for piece in pieces[name]) if len(own) > 1 else ()
        specs.append(WeightSpec(name, shape, str(dtype), joined_checksum(own) if stops else own[0], stops))
    return specs
