"""Memory that holds one bucket of weights after the other, which another process of this machine maps.

On the host it is a file in memory (`unirl.types.bucket_files`), on a GPU an allocation that CUDA hands to the other
process. Its place crosses as plain values, since the two may have different versions of torch.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from unirl.types.bucket_files import BucketFiles, BucketLayout, MappedBuckets
from unirl.types.devices import is_accelerator
from unirl.types.errors import WeightSyncError, as_sentence

Place = dict[str, Any]
"""Where a bucket lies, as JSON: what `BucketWriter.write` gives and `BucketReader.tensors` takes."""


@dataclass(frozen=True)
class _Allocation:
    """An allocation on a GPU, as `torch.multiprocessing` describes it. Bytes are in base64."""

    handle: str
    num_bytes: int
    """Size of the buffer."""
    offset: int
    """Where the buffer begins in the allocation."""
    counter: str
    counter_offset: int
    event: str
    waits: bool

    @classmethod
    def of(cls, buffer: Tensor) -> _Allocation:
        handle, num_bytes, offset, _, counter, counter_offset, event, waits = reduce_tensor(buffer)[1][7:]
        return cls(_text(handle), num_bytes, offset, _text(counter), counter_offset, _text(event), bool(waits))

    def mapped(self, size: int) -> Tensor:
        """Its first `size` bytes on the current device of this process, uint8."""
        return rebuild_cuda_tensor(
            Tensor,
            (size,),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            torch.accelerator.current_device_index(),
            base64.b64decode(self.handle),
            self.num_bytes,
            self.offset,
            False,
            base64.b64decode(self.counter),
            self.counter_offset,
            base64.b64decode(self.event),
            self.waits,
        )


class BucketWriter:
    """Writes each bucket over the last one, into memory of a device, as much as the largest bucket needs.

    folder: of the file where the device is a CPU.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        """Where the memory is."""
        self._files = BucketFiles(folder)
        self._buffer: Tensor | None = None

    def write(self, tensors: Mapping[str, Tensor]) -> Place:
        """Write the tensors of a bucket; valid until the next `write` or `drop`. Raises WeightSyncError if there is no
        room on the host, or the GPU does not share its memory."""
        if not is_accelerator(self.device):
            return {"path": str(self._files.write(0, tensors))}
        layout = BucketLayout.of(tensors)
        if self._buffer is None or self._buffer.numel() < layout.num_bytes:
            self._buffer = None  # given back before the larger one is taken
            self._buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
        layout.write(tensors, self._buffer)
        torch.accelerator.synchronize(self.device)  # the other process does not see this stream
        try:
            allocation = _Allocation.of(self._buffer)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.device} does not share its memory: {as_sentence(error)} Remove sync.transport: ipc."
            ) from error
        return {"num_bytes": layout.num_bytes, "allocation": asdict(allocation)}

    def drop(self) -> None:
        """Give the memory of a GPU back."""
        self._buffer = None


class BucketReader:
    """Maps what a `BucketWriter` writes."""

    def __init__(self) -> None:
        self._files = MappedBuckets()
        self._buffer: Tensor | None = None

    def tensors(self, place: Place) -> dict[str, Tensor]:
        """The tensors of a bucket. They share the writer's memory and must not be written to.

        Raises WeightSyncError if they cannot be mapped.
        """
        if "path" in place:
            return self._files.tensors(place["path"])
        try:
            self._buffer = _Allocation(**place["allocation"]).mapped(place["num_bytes"])
            length = 8 + int.from_bytes(bytes(self._buffer[:8].cpu().numpy()), "little")
            return BucketLayout.parse(bytes(self._buffer[:length].cpu().numpy())).views(self._buffer)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise WeightSyncError(
                f"memory of a GPU cannot be mapped: {as_sentence(error)} Remove sync.transport: ipc."
            ) from error

    def settle(self) -> None:
        """Return once copies of what was mapped have ended, so that it may be written to again."""
        if self._buffer is not None:
            torch.accelerator.synchronize(self._buffer.device)

    def forget(self) -> None:
        """Unmap what is mapped."""
        self._buffer = None
        self._files.forget_removed()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
