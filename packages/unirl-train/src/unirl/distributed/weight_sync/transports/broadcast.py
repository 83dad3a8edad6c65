"""Broadcasts buckets from the trainer to all engines: over NCCL between GPUs, over gloo between hosts."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from unirl.distributed.group.framework import ray_module
from unirl.distributed.weight_sync.plan import Piece, PlannedBucket
from unirl.distributed.weight_sync.transports.base import NUM_UNDER_WAY, Parcel, SlicingTransport
from unirl.distributed.weight_sync.transports.flat import FlatBucket, roomy
from unirl.types.device_kinds import kind_of
from unirl.types.devices import is_accelerator
from unirl.types.errors import WeightSyncError, as_sentence
from unirl.types.weights import WeightBucket, WeightSpec, checksums_as

_RUN_BYTES = 16 << 20
"""Gloo is slower for larger broadcasts and for many small ones. Each run is hashed while the next one arrives."""
_LONE_BYTES = 1 << 20
"""A piece of at least this size is sent from where it lies; smaller ones are copied next to each other first."""
_JOINED = "joined"
"""Key in the store that counts the engines that have joined."""


@dataclass(frozen=True)
class Meeting:
    """Address and members of one broadcast group."""

    name: str
    """Unique; a failed group is not reused."""
    host: str
    port: int
    num_members: int
    """The trainer (rank 0) and the engines."""
    device: str
    """Device type of the buffers."""
    timeout_s: float

    def store(self, *, is_master: bool) -> torch.distributed.TCPStore:
        """The store of the group, opened by the trainer or joined by an engine."""
        timeout = timedelta(seconds=self.timeout_s)
        return torch.distributed.TCPStore(
            self.host, self.port, is_master=is_master, wait_for_workers=False, timeout=timeout
        )

    def group(self, store: torch.distributed.Store, rank: int) -> Any:  # Any: torch's backends share no public class
        """The group of the members; returns when all have joined. Separate from the default process group."""
        timeout = timedelta(seconds=self.timeout_s)
        if kind_of(self.device).is_accelerator:
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return torch.distributed.ProcessGroupNCCL(store, rank, self.num_members, options)
        return torch.distributed.ProcessGroupGloo(store, rank, self.num_members, timeout)


def _broadcast(group: Any, piece: Tensor) -> Any:  # Any: torch's backends and their work share no public class
    """Start a broadcast of the sender's piece."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([piece], options)


@dataclass(frozen=True)
class Run:
    """Byte range of a bucket that one rank broadcasts at once."""

    sender: int
    start: int
    stop: int
    is_lone: bool
    """True if it is of one piece, and is sent from where that lies."""

    def of(self, buffer: Tensor) -> Tensor:
        """This run's part of a bucket's bytes."""
        return buffer[self.start : self.stop]


def runs_of(spans: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Runs of at most `_RUN_BYTES` for consecutive pieces (sender, start, stop): small ones joined, large ones cut."""
    runs: list[Run] = []
    for sender, start, stop in spans:
        if stop - start >= _LONE_BYTES:
            runs += [
                Run(sender, first, min(first + _RUN_BYTES, stop), True) for first in range(start, stop, _RUN_BYTES)
            ]
            continue
        last = runs[-1] if runs else None
        if (
            last is not None
            and not last.is_lone
            and (last.sender, last.stop) == (sender, start)
            and stop - last.start <= _RUN_BYTES
        ):
            start = runs.pop().start
        if stop > start:
            runs.append(Run(sender, start, stop, is_lone=False))
    return tuple(runs)


@dataclass(frozen=True)
class BroadcastParcel(Parcel):
    """Tells an engine to take part in the broadcasts of a bucket."""

    meetings: tuple[Meeting, ...]
    """One per sender."""
    bucket: FlatBucket
    number: int
    runs: tuple[Run, ...]

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        place = f"broadcast {' '.join(meeting.name for meeting in self.meetings)}"
        if place in kept and kept[place] is None:
            raise WeightSyncError(
                f"the bucket before this one of version {self.bucket.head.policy_version} did not arrive"
            )
        try:
            if place not in kept:
                kept[place] = _Receiver(self.meetings)
            return kept[place].receive(self)
        except RuntimeError as error:
            kept[place] = None  # later parcels of the group need not wait
            raise WeightSyncError(
                f"a bucket of version {self.bucket.head.policy_version} did not arrive by broadcast: {error}"
            ) from error


class _Receiver:
    """An engine's side of the groups of all senders."""

    def __init__(self, meetings: Sequence[Meeting]) -> None:
        self._timeout_s = meetings[0].timeout_s
        self._device = torch.device(meetings[0].device)
        self._stores = [meeting.store(is_master=False) for meeting in meetings]
        self._groups = [
            meeting.group(store, store.add(_JOINED, 1)) for meeting, store in zip(meetings, self._stores, strict=True)
        ]
        self._buffers: dict[int, Tensor] = {}

    def receive(self, parcel: BroadcastParcel) -> WeightBucket:
        """Receive a bucket in the buffer of its number. On the host tensors are hashed while the next ones arrive."""
        number, flat = parcel.number, parcel.bucket
        buffer = self._buffers[number] = roomy(self._buffers.get(number), flat.num_bytes, self._device)
        works = deque((run.stop, _broadcast(self._groups[run.sender], run.of(buffer))) for run in parcel.runs)
        bucket, specs = flat.read(buffer), {spec.name: spec for spec in flat.head.specs}
        found, arrived = {}, 0
        for name, *_, end in flat.layout.spans:
            while arrived < end and works:
                arrived, work = works.popleft()
                work.wait(timedelta(seconds=self._timeout_s))
            if name in specs and not is_accelerator(self._device):  # a delta is checked by the tensor that it makes
                found[name] = checksums_as([specs[name]], [bucket.tensors[name]])[0]
        return dataclasses.replace(bucket, found=found)


class BroadcastTransport(SlicingTransport):
    """Broadcasts each bucket to all engines at once: large tensors from where they lie, small ones from one of two
    buffers, of which one is filled while the other is sent. Every sending rank has its own group with the engines.

    device: of what is sent: a GPU for NCCL, a CPU for gloo. num_engines: number of engines; neither the trainer nor
    another engine may be on their devices. timeout_s: for forming a group and for each broadcast.
    """

    def __init__(self, device: torch.device, num_engines: int, timeout_s: float) -> None:
        self._device = device
        self._num_members = num_engines + 1
        self._timeout_s = timeout_s
        self._rank = 0
        self._sender: _Sender | None = None
        self._meetings: tuple[Meeting, ...] = ()
        self._buffers: dict[int, Tensor] = {}
        self._leaving: dict[int, dict[int, Tensor]] = {}
        """Bucket -> what this rank sends of it, uint8, by its first byte in the bucket."""

    @property
    def device(self) -> torch.device:
        return self._device

    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        flat, meeting = FlatBucket.of(bucket), Meeting(**self.opened(0))
        runs = runs_of((0, start, stop) for *_, start, stop in flat.layout.spans)
        self._make_room(number, runs)
        for name, *_, start, _ in flat.layout.spans:
            self._put(number, start, bucket.tensors[name])
        return BroadcastParcel((meeting,), flat, number, runs)

    def depart(self, number: int) -> None:
        pieces = self._leaving.pop(number, {})
        if self._sender is not None and pieces:
            self._sender.start(number, [pieces[start] for start in sorted(pieces)])

    def arrived(self, number: int) -> None:
        """See WeightTransport. Raises WeightSyncError if the broadcast failed on this side."""
        if self._sender is not None:
            self._sender.wait(number)

    def drop(self) -> None:
        self._sender = None
        self._buffers.clear()  # a hanging broadcast may still read them
        self._leaving.clear()

    def opened(self, rank: int) -> dict[str, Any]:  # Any: see SlicingTransport
        """The meeting of this rank's group."""
        self._rank = rank
        if self._sender is None:
            self._sender = _Sender(self._device.type, self._num_members, self._timeout_s)
        return dataclasses.asdict(self._sender.meeting)

    def join(self, opened: Sequence[Any]) -> None:  # Any: see SlicingTransport
        self._meetings = tuple(Meeting(**each) for each in opened)

    def begin(self, number: int, bucket: PlannedBucket) -> None:
        self._make_room(number, _runs_of_pieces(bucket))

    def write(self, number: int, bucket: PlannedBucket, piece: Piece, rows: Tensor) -> None:
        self._put(number, bucket.layout.span(piece.name, piece.start, piece.stop)[0], rows)

    def parcel(self, number: int, version: int, bucket: PlannedBucket, specs: Sequence[WeightSpec]) -> Parcel:
        flat = FlatBucket(WeightBucket(version, {}, tuple(specs)), bucket.layout)
        return BroadcastParcel(self._meetings, flat, number, _runs_of_pieces(bucket))

    def settle(self) -> None:
        if self._sender is not None:
            self._sender.wait_for_all()

    def _make_room(self, number: int, runs: Sequence[Run]) -> None:
        """A buffer for the small pieces of a bucket, once its previous content has been sent."""
        self.arrived(number - NUM_UNDER_WAY)
        joined = [run for run in runs if run.sender == self._rank and not run.is_lone]
        ends = list(itertools.accumulate((run.stop - run.start for run in joined), initial=0))
        slot = number % NUM_UNDER_WAY
        buffer = self._buffers[slot] = roomy(self._buffers.get(slot), ends[-1], self._device)
        self._leaving[number] = {
            run.start: buffer[start:stop] for run, (start, stop) in zip(joined, itertools.pairwise(ends), strict=True)
        }

    def _put(self, number: int, start: int, rows: Tensor) -> None:
        """Put a piece whose first byte in the bucket is `start` among what leaves; a large one is not copied."""
        content = rows.detach().to(self._device).contiguous().flatten().view(torch.uint8)
        leaving = self._leaving[number]
        if content.numel() >= _LONE_BYTES:
            cuts = range(0, content.numel(), _RUN_BYTES)
            leaving.update({start + at: part for at, part in zip(cuts, content.split(_RUN_BYTES), strict=True)})
        elif content.numel():
            first = max(begin for begin in leaving if begin <= start)
            leaving[first][start - first :][: content.numel()].copy_(content)


def _runs_of_pieces(bucket: PlannedBucket) -> tuple[Run, ...]:
    return runs_of((piece.rank, *bucket.layout.span(piece.name, piece.start, piece.stop)) for piece in bucket.pieces)


class _Sender:
    """The trainer's side of one group. Broadcasts run in threads, one after the other, because a dead engine makes them
    hang; the caller that waits for its answer notices the death."""

    def __init__(self, device: str, num_members: int, timeout_s: float) -> None:
        host = ray_module().util.get_node_ip_address()
        opening = Meeting(secrets.token_hex(8), host, 0, num_members, device, timeout_s)
        self._store = opening.store(is_master=True)
        self.meeting = dataclasses.replace(opening, port=self._store.port)
        self._group: Any = None  # Any: see Meeting.group
        self._threads: dict[int, threading.Thread] = {}
        self._last: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, number: int, pieces: Sequence[Tensor]) -> None:
        """Broadcast the pieces of a bucket after earlier ones."""
        self._last = threading.Thread(target=self._send, args=(pieces, self._last), daemon=True)
        self._threads[number] = self._last
        self._last.start()

    def wait_for_all(self) -> None:
        """`wait` for every bucket."""
        for number in list(self._threads):
            self.wait(number)

    def wait(self, number: int) -> None:
        """Wait until the pieces of a bucket have been sent. Raises WeightSyncError if that fails."""
        thread = self._threads.pop(number, None)
        if thread is not None:
            thread.join(2 * self.meeting.timeout_s)
        if self._error is not None or (thread is not None and thread.is_alive()):
            raise WeightSyncError(
                f"a bucket did not leave by broadcast to {self.meeting.num_members - 1} engines within "
                f"{self.meeting.timeout_s:.0f} s: {as_sentence(self._error)} Between nodes set GLOO_SOCKET_IFNAME, or "
                "NCCL_SOCKET_IFNAME for GPUs."
            ) from self._error

    def _send(self, pieces: Sequence[Tensor], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._error is not None:
            return
        try:
            if self._group is None:
                self._group = self.meeting.group(self._store, 0)
            works = [_broadcast(self._group, piece) for piece in pieces]
            for work in works:
                work.wait(timedelta(seconds=self.meeting.timeout_s))
        except RuntimeError as error:
            self._error = error
