"""Buckets in memory that trainer and engines of one node share: of the GPU by CUDA IPC handles, else of the host."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from unirl.distributed.weight_sync.transports.base import Parcel, WeightTransport
from unirl.distributed.weight_sync.transports.flat import FlatBucket, roomy
from unirl.types.errors import WeightSyncError, as_sentence
from unirl.types.weights import WeightBucket


@dataclass(frozen=True)
class SharedBuffer:
    """How another process of the node finds a buffer."""

    name: str
    """Unique; a buffer is mapped once per process."""
    node: str
    rebuild: Callable[..., Any]  # Any: torch's own functions, which give a tensor or a storage
    args: tuple[Any, ...]

    def mapped(self) -> Tensor:
        """The buffer in this process, uint8. Raises WeightSyncError where it is out of reach."""
        try:
            memory = self.rebuild(*self.args)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"memory that {self.node} shares cannot be mapped on {platform.node()}: {as_sentence(error)} ipc "
                "needs what trains and the engines on one node, and for GPUs each to see the other's; otherwise set "
                "sync.transport: nccl."
            ) from error
        return memory if isinstance(memory, Tensor) else torch.empty(0, dtype=torch.uint8).set_(memory)


@dataclass(frozen=True)
class SharedParcel(Parcel):
    """Where the tensors lie in a shared buffer."""

    buffer: SharedBuffer
    slot: str
    bucket: FlatBucket

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        name, memory = kept.get(self.slot, (None, None))
        if name != self.buffer.name:
            kept.pop(self.slot, None)  # the old buffer is unmapped first
            memory = self.buffer.mapped()
            kept[self.slot] = (self.buffer.name, memory)
        return self.bucket.read(memory)


class SharedMemoryTransport(WeightTransport):
    """Copies each bucket into one of two buffers that the engines have mapped.

    device: of the buffers: "cuda" for CUDA IPC, "cpu" for shared host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = itertools.count()
        self._buffers: dict[int, tuple[Tensor, SharedBuffer]] = {}

    def pack(self, bucket: WeightBucket, slot: int) -> Parcel:
        flat = FlatBucket.of(bucket)
        buffer, shared = self._buffer(slot, flat.num_bytes)
        flat.layout.write(bucket.tensors, buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # the engine's process knows nothing of this stream
        return SharedParcel(shared, f"ipc {shared.name.rsplit('-', 1)[0]} {slot}", flat)

    def _buffer(self, slot: int, num_bytes: int) -> tuple[Tensor, SharedBuffer]:
        present = self._buffers.get(slot)
        if present is None or present[0].numel() < num_bytes:
            self._buffers.pop(slot, None)
            buffer = roomy(None, num_bytes, self._device)
            name = f"{platform.node()}-{os.getpid()}-{id(self)}-{next(self._numbers)}"
            present = self._buffers[slot] = (buffer, SharedBuffer(name, platform.node(), *_handle(buffer)))
        return present

    def drop(self) -> None:
        self._buffers.clear()


def _handle(buffer: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # Any: torch's own
    """A function and its arguments, all plain values, that give another process the buffer."""
    if buffer.is_cuda:
        return reduce_tensor(buffer)
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # a name, where the other kind is an open descriptor
    try:
        return reduce_storage(buffer.untyped_storage())
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
