"""Interface of transports: the sender packs a bucket of weights into a parcel, and the engine's worker opens it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unirl.distributed.weight_sync.plan import Piece, PlannedBucket
from unirl.distributed.weight_sync.transports.flat import roomy
from unirl.types.bucket_files import BucketLayout
from unirl.types.weights import WeightBucket, WeightSpec

TransportName = Literal["ray", "files", "ipc", "nccl"]


class Parcel(ABC):
    """What is sent through Ray to every engine for one bucket. Pickles; contains the tensors or says how to find them.

    Implements unirl.distributed.worker.Openable.
    """

    @abstractmethod
    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: buffers and connections, each transport's own
        """The bucket, in an engine's worker. Its tensors are valid until the next push begins.

        kept: what this worker keeps between parcels; changed in place.
        Raises WeightSyncError if the tensors cannot be read.
        """


NUM_UNDER_WAY = 2
"""Most parcels in flight at once: one is packed while the engines still load the other."""


class WeightTransport(ABC):
    """Sender of the parcels of a push, which are numbered from 0.

    parcel = transport.pack(bucket, number)
    ...                                     # the parcel is handed to every engine
    transport.depart(number)
    ...                                     # every engine has answered
    transport.arrived(number)
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors of a parcel lie once it is opened."""
        return torch.device("cpu")

    @abstractmethod
    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        """Prepare a bucket for sending."""

    def depart(self, number: int) -> None:  # noqa: B027 (most leave with their parcel)
        """Send what is not in the parcel itself, once the engines have the parcel."""

    def arrived(self, number: int) -> None:  # noqa: B027
        """Called when every engine has loaded this parcel."""

    def drop(self) -> None:  # noqa: B027
        """Drop everything in flight after a failure; the next parcel starts afresh."""


class SlicingTransport(WeightTransport):
    """Takes buckets in pieces, which several ranks write at once. Each rank has one.

    transport.join([what `opened` gave on each rank])
    transport.begin(number, bucket); transport.write(number, bucket, piece, rows); ...
    ...                                     # all ranks have written
    transport.parcel(number, ...)           # on rank 0, which passes it to the engines transport.depart(number)
    ...
    transport.settle()
    """

    @abstractmethod
    def opened(self, rank: int) -> Any:  # Any: JSON, each transport's own
        """What the other ranks need to know about this one."""

    @abstractmethod
    def join(self, opened: Sequence[Any]) -> None:
        """Take part in a push."""

    @abstractmethod
    def begin(self, number: int, bucket: PlannedBucket) -> None:
        """Make room for a bucket."""

    @abstractmethod
    def write(self, number: int, bucket: PlannedBucket, piece: Piece, rows: Tensor) -> None:
        """Write a piece of this rank; its rows must not change until `settle`."""

    @abstractmethod
    def parcel(self, number: int, version: int, bucket: PlannedBucket, specs: Sequence[WeightSpec]) -> Parcel:
        """The parcel of a bucket."""

    def settle(self) -> None:  # noqa: B027
        """Wait until everything that this rank wrote has been sent. Raises WeightSyncError if that fails."""


@dataclass(frozen=True)
class ObjectParcel(Parcel):
    """The tensors' bytes as numpy arrays, which Ray copies into its object store once."""

    number: int
    head: WeightBucket
    """The bucket without its tensors."""
    arrays: tuple[Any, ...]  # Any: numpy's uint8 arrays, one per tensor
    layouts: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor."""

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        """See Parcel. The tensors are copied, so that the object store only holds parcels in flight."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            stored = {
                name: torch.from_numpy(array).view(dtype).view(shape)
                for array, (name, dtype, shape) in zip(self.arrays, self.layouts, strict=True)
            }
        layout, place = BucketLayout.of(stored), f"ray {self.number}"
        buffer = kept[place] = roomy(kept.get(place), layout.num_bytes, torch.device("cpu"))
        layout.write(stored, buffer)
        return self.head.with_tensors(layout.views(buffer))


class ObjectTransport(WeightTransport):
    """Sends tensors as bytes in Ray's object store, which each node fetches once. Needs no shared memory or files."""

    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.tensors.items()}
        return ObjectParcel(
            number,
            bucket.with_tensors({}),
            tuple(tensor.flatten().view(torch.uint8).numpy() for tensor in own.values()),
            tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()),
        )
