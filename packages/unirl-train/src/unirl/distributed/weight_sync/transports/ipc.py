"""Buckets in the memory of a GPU that trainer and engines share, through CUDA IPC handles."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from unirl.distributed.weight_sync.transports.base import Parcel, WeightTransport
from unirl.distributed.weight_sync.transports.flat import FlatBucket, roomy
from unirl.types.errors import WeightSyncError, as_sentence
from unirl.types.weights import WeightBucket


@dataclass(frozen=True)
class DeviceBuffer:
    """Handle by which another process of the node maps a buffer on a GPU."""

    name: str
    """Unique; a buffer is mapped once per process."""
    rebuild: Callable[..., Tensor]
    args: tuple[Any, ...]  # Any: torch's own

    def mapped(self) -> Tensor:
        """The buffer mapped into this process, uint8. Raises WeightSyncError if it cannot be mapped."""
        try:
            return self.rebuild(*self.args)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"memory of a GPU cannot be mapped on {platform.node()}: {as_sentence(error)} ipc needs what trains "
                "and the engines to see one GPU; otherwise set sync.transport: nccl."
            ) from error


@dataclass(frozen=True)
class DeviceParcel(Parcel):
    """A bucket in a buffer on a GPU."""

    buffer: DeviceBuffer
    place: str
    bucket: FlatBucket

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        name, memory = kept.get(self.place, (None, None))
        if name != self.buffer.name:
            kept.pop(self.place, None)  # the old buffer is unmapped first
            memory = self.buffer.mapped()
            kept[self.place] = (self.buffer.name, memory)
        return self.bucket.read(memory)


class DeviceTransport(WeightTransport):
    """Copies each bucket into a GPU buffer that the engines have mapped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = itertools.count()
        self._buffers: dict[int, tuple[Tensor, DeviceBuffer]] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        flat = FlatBucket.of(bucket)
        buffer, shared = self._buffer(number, flat.num_bytes)
        flat.layout.write(bucket.tensors, buffer)
        torch.accelerator.synchronize(buffer.device)  # the engine's process does not see this stream
        return DeviceParcel(shared, f"ipc {shared.name.rsplit('-', 1)[0]} {number}", flat)

    def _buffer(self, number: int, num_bytes: int) -> tuple[Tensor, DeviceBuffer]:
        present = self._buffers.get(number)
        if present is None or present[0].numel() < num_bytes:
            self._buffers.pop(number, None)
            buffer = roomy(None, num_bytes, self._device)
            name = f"{platform.node()}-{os.getpid()}-{id(self)}-{next(self._numbers)}"
            present = self._buffers[number] = (buffer, DeviceBuffer(name, *reduce_tensor(buffer)))
        return present

    def drop(self) -> None:
        self._buffers.clear()
