"""Buckets by broadcast from the trainer to all engines: over NCCL between GPUs, over gloo between hosts."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from unirl.distributed.group.framework import ray_module
from unirl.distributed.weight_sync.transports.base import Parcel, WeightTransport
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


def _broadcast(group: Any, buffer: Tensor) -> Any:  # Any: torch's backends and their work share no public class
    """Start a broadcast of the trainer's buffer."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([buffer], options)


@dataclass(frozen=True)
class BroadcastParcel(Parcel):
    """Tells an engine to take part in the broadcast of a bucket."""

    meeting: Meeting
    bucket: FlatBucket
    slot: int

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        place = f"broadcast {self.meeting.name}"
        if place in kept and kept[place] is None:
            raise WeightSyncError(f"the bucket before this one of version {self.bucket.policy_version} did not arrive")
        try:
            if place not in kept:
                kept[place] = _Receiver(self.meeting)
            buffer = kept[place].receive(self.slot, self.bucket.num_bytes)
        except RuntimeError as error:
            kept[place] = None  # what follows in the same group need not wait
            raise WeightSyncError(
                f"a bucket of version {self.bucket.policy_version} did not arrive by broadcast: {error}"
            ) from error
        return self.bucket.read(buffer)


class _Receiver:
    """An engine's side of one group."""

    def __init__(self, meeting: Meeting) -> None:
        self._timeout = timedelta(seconds=meeting.timeout_s)
        self._device = torch.device(meeting.device)
        self._store = meeting.store(is_master=False)
        self._group = meeting.group(self._store, self._store.add(_JOINED, 1))
        self._buffers: dict[int, Tensor] = {}

    def receive(self, slot: int, num_bytes: int) -> Tensor:
        """The next broadcast, in the buffer of a slot."""
        buffer = self._buffers[slot] = roomy(self._buffers.get(slot), num_bytes, self._device)
        if num_bytes:
            _broadcast(self._group, buffer[:num_bytes]).wait(self._timeout)
        return buffer


class BroadcastTransport(WeightTransport):
    """Broadcasts each bucket to all engines at once, from one of two buffers: one is filled while the other leaves.

    device: of the buffers, so "cuda" for NCCL and "cpu" for gloo. num_engines: how many take part, each with a device
    that neither the trainer nor another engine has. timeout_s: of the group's forming and of each broadcast.
    """

    def __init__(self, device: torch.device, num_engines: int, timeout_s: float) -> None:
        self._device = device
        self._num_members = num_engines + 1
        self._timeout_s = timeout_s
        self._sender: _Sender | None = None
        self._flat: dict[int, tuple[FlatBucket, Tensor]] = {}

    def pack(self, bucket: WeightBucket, slot: int) -> Parcel:
        if self._sender is None:
            self._sender = _Sender(self._device.type, self._num_members, self._timeout_s)
        flat = FlatBucket.of(bucket)
        buffer = roomy(self._flat[slot][1] if slot in self._flat else None, flat.num_bytes, self._device)
        flat.layout.write(bucket.tensors, buffer)
        self._flat[slot] = (flat, buffer)
        return BroadcastParcel(self._sender.meeting, flat, slot)

    def depart(self, slot: int) -> None:
        flat, buffer = self._flat[slot]
        if self._sender is not None and flat.num_bytes:
            self._sender.start(slot, buffer[: flat.num_bytes])

    def arrived(self, slot: int) -> None:
        """See WeightTransport. Raises WeightSyncError where the broadcast failed on this side."""
        if self._sender is not None:
            self._sender.wait(slot)

    def drop(self) -> None:
        self._sender = None
        self._flat.clear()  # a broadcast that hangs may still read them


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

    def start(self, slot: int, buffer: Tensor) -> None:
        """Broadcast a buffer after those before it."""
        self._last = threading.Thread(target=self._send, args=(buffer, self._last), daemon=True)
        self._threads[slot] = self._last
        self._last.start()

    def wait(self, slot: int) -> None:
        """Return when the buffer of a slot has left. Raises WeightSyncError where it could not."""
        thread = self._threads.pop(slot, None)
        if thread is not None:
            thread.join(2 * self.meeting.timeout_s)
        if self._error is not None or (thread is not None and thread.is_alive()):
            raise WeightSyncError(
                f"a bucket did not leave by broadcast to {self.meeting.num_members - 1} engines within "
                f"{self.meeting.timeout_s:.0f} s: {as_sentence(self._error)} Between nodes set GLOO_SOCKET_IFNAME, or "
                "NCCL_SOCKET_IFNAME for GPUs."
            ) from self._error

    def _send(self, buffer: Tensor, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._error is not None:
            return
        try:
            if self._group is None:
                self._group = self.meeting.group(self._store, 0)
            _broadcast(self._group, buffer).wait(timedelta(seconds=self.meeting.timeout_s))
        except RuntimeError as error:
            self._error = error
