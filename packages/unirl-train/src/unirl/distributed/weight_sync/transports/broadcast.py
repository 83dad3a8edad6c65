"""Buckets by broadcast from the trainer to all engines: over NCCL between GPUs, over gloo between hosts."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from unirl.distributed.group.framework import ray_module
from unirl.distributed.weight_sync.transports.base import NUM_UNDER_WAY, Parcel, WeightTransport
from unirl.distributed.weight_sync.transports.flat import FlatBucket, roomy
from unirl.types.errors import WeightSyncError, as_sentence
from unirl.types.weights import WeightBucket

_JOINED = "joined"
"""Key of the store that counts the engines which have joined."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of one broadcast group meet."""

    name: str
    """Unique; a failed group is never used again."""
    host: str
    port: int
    num_members: int
    """The trainer, rank 0, and the engines."""
    device: str
    """Kind of device that the buffers are on."""
    timeout_s: float

    def store(self, *, is_master: bool) -> torch.distributed.TCPStore:
        """The meeting point, opened by the trainer or entered by an engine."""
        timeout = timedelta(seconds=self.timeout_s)
        return torch.distributed.TCPStore(
            self.host, self.port, is_master=is_master, wait_for_workers=False, timeout=timeout
        )

    def group(self, store: torch.distributed.Store, rank: int) -> Any:  # Any: torch's backends share no public class
        """The members' group; returns when all have come. Beside the default process group, which it leaves alone."""
        timeout = timedelta(seconds=self.timeout_s)
        if self.device == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return torch.distributed.ProcessGroupNCCL(store, rank, self.num_members, options)
        return torch.distributed.ProcessGroupGloo(store, rank, self.num_members, timeout)


def _broadcast(group: Any, pieces: Sequence[Tensor], timeout_s: float) -> None:  # Any: see Meeting.group
    """Take part in broadcasts of the trainer's pieces."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    works = [group.broadcast([piece], options) for piece in pieces]
    for work in works:
        work.wait(timedelta(seconds=timeout_s))


def _pieces(bucket: FlatBucket, buffer: Tensor) -> list[Tensor]:
    """What crosses of a bucket that lies in a buffer: on a GPU all of it at once, else each tensor by itself."""
    if buffer.is_cuda:
        return [buffer[: bucket.num_bytes]] if bucket.specs else []
    return [buffer[start:stop] for *_, start, stop in bucket.layout.spans if stop > start]


@dataclass(frozen=True)
class BroadcastParcel(Parcel):
    """Tells an engine to take part in the broadcast of a bucket."""

    meeting: Meeting
    bucket: FlatBucket
    number: int

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        place = f"broadcast {self.meeting.name}"
        if place in kept and kept[place] is None:
            raise WeightSyncError(f"the bucket before this one of version {self.bucket.policy_version} did not arrive")
        try:
            if place not in kept:
                kept[place] = _Receiver(self.meeting)
            buffer = kept[place].receive(self.number, self.bucket)
        except RuntimeError as error:
            kept[place] = None  # what follows in the same group need not wait
            raise WeightSyncError(
                f"a bucket of version {self.bucket.policy_version} did not arrive by broadcast: {error}"
            ) from error
        return self.bucket.read(buffer)


class _Receiver:
    """An engine's side of one group."""

    def __init__(self, meeting: Meeting) -> None:
        self._timeout_s = meeting.timeout_s
        self._device = torch.device(meeting.device)
        self._store = meeting.store(is_master=False)
        self._group = meeting.group(self._store, self._store.add(_JOINED, 1))
        self._buffers: dict[int, Tensor] = {}

    def receive(self, number: int, bucket: FlatBucket) -> Tensor:
        """The next broadcast, in the buffer of this number."""
        buffer = self._buffers[number] = roomy(self._buffers.get(number), bucket.num_bytes, self._device)
        _broadcast(self._group, _pieces(bucket, buffer), self._timeout_s)
        return buffer


class BroadcastTransport(WeightTransport):
    """Broadcasts each bucket to all engines at once: from a GPU out of one of two buffers, of which one is filled while
    the other leaves, else tensor by tensor from where they lie.

    device: "cuda" for NCCL, "cpu" for gloo. num_engines: how many take part, each with a device
    that neither the trainer nor another engine has. timeout_s: of the group's forming and of each broadcast.
    """

    def __init__(self, device: torch.device, num_engines: int, timeout_s: float) -> None:
        self._device = device
        self._num_members = num_engines + 1
        self._timeout_s = timeout_s
        self._sender: _Sender | None = None
        self._buffers: dict[int, Tensor] = {}
        self._leaving: dict[int, list[Tensor]] = {}

    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        slot = number % NUM_UNDER_WAY
        if self._sender is None:
            self._sender = _Sender(self._device.type, self._num_members, self._timeout_s)
        flat = FlatBucket.of(bucket)
        if self._device.type == "cuda":
            buffer = self._buffers[slot] = roomy(self._buffers.get(slot), flat.num_bytes, self._device)
            flat.layout.write(bucket.tensors, buffer)
            self._leaving[slot] = _pieces(flat, buffer)
        else:
            whole = [bucket.tensors[name].detach().cpu().contiguous() for name, *_ in flat.layout.spans]
            self._leaving[slot] = [tensor.flatten().view(torch.uint8) for tensor in whole if tensor.numel()]
        return BroadcastParcel(self._sender.meeting, flat, number)

    def depart(self, number: int) -> None:
        slot = number % NUM_UNDER_WAY
        if self._sender is not None and self._leaving[slot]:
            self._sender.start(slot, self._leaving[slot])

    def arrived(self, number: int) -> None:
        """See WeightTransport. Raises WeightSyncError where the broadcast failed on this side."""
        if self._sender is not None:
            self._sender.wait(number % NUM_UNDER_WAY)

    def drop(self) -> None:
        self._sender = None
        self._buffers.clear()  # a broadcast that hangs may still read them
        self._leaving.clear()


class _Sender:
    """The trainer's side of one group. Broadcasts run in threads, one after the other: an engine that is gone lets them
    hang, and its end is seen by who waits for its answer."""

    def __init__(self, device: str, num_members: int, timeout_s: float) -> None:
        host = ray_module().util.get_node_ip_address()
        opening = Meeting(secrets.token_hex(8), host, 0, num_members, device, timeout_s)
        self._store = opening.store(is_master=True)
        self.meeting = dataclasses.replace(opening, port=self._store.port)
        self._group: Any = None  # Any: see Meeting.group
        self._threads: dict[int, threading.Thread] = {}
        self._last: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, slot: int, pieces: Sequence[Tensor]) -> None:
        """Broadcast the pieces of a slot after those before them."""
        self._last = threading.Thread(target=self._send, args=(pieces, self._last), daemon=True)
        self._threads[slot] = self._last
        self._last.start()

    def wait(self, slot: int) -> None:
        """Return when the pieces of a slot have left. Raises WeightSyncError where it could not."""
        thread = self._threads.pop(slot, None)
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
            _broadcast(self._group, pieces, self.meeting.timeout_s)
        except RuntimeError as error:
            self._error = error
