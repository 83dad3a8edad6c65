"""A bucket of weights on its way: the sender packs a parcel, the engine's worker opens it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from unirl.types.weights import WeightBucket, WeightSpec

TransportName = Literal["ray", "files", "ipc", "nccl"]


class Parcel(ABC):
    """What travels through Ray for one bucket, to every engine. Pickles; of the tensors it has what finds them.

    Implements unirl.distributed.worker.Openable.
    """

    @abstractmethod
    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: buffers and connections, each transport's own
        """The bucket, in the worker of an engine. Its tensors are good until the engine has answered.

        kept: what this worker keeps between parcels; written here.
        Raises WeightSyncError where the tensors cannot be had.
        """


class WeightTransport(ABC):
    """Sender of parcels. At most `num_slots` are on their way at once, each in a slot of its own: one is filled while
    the engines still take the other.

        parcel = transport.pack(bucket, slot)
        ...                                     # the parcel is handed to every engine; the tensors may change then
        transport.depart(slot)
        ...                                     # every engine has answered
        transport.arrived(slot)
    """

    num_slots: ClassVar[int] = 2

    @abstractmethod
    def pack(self, bucket: WeightBucket, slot: int) -> Parcel:
        """Make a bucket ready to leave."""

    def depart(self, slot: int) -> None:  # noqa: B027 (most leave with their parcel)
        """Send what does not travel with the parcel itself, once the engines have been told of it."""

    def arrived(self, slot: int) -> None:  # noqa: B027
        """Every engine has taken the parcel of this slot."""

    def drop(self) -> None:  # noqa: B027
        """Forget what is on its way, after a failure; the next parcel begins anew."""


@dataclass(frozen=True)
class ObjectParcel(Parcel):
    """The bytes of the tensors as numpy arrays, which Ray copies into its object store once and reads in place."""

    policy_version: int
    arrays: tuple[Any, ...]  # Any: numpy's uint8 arrays, one per tensor
    layouts: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor."""
    specs: tuple[WeightSpec, ...]
    kept: tuple[WeightSpec, ...]

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        """See Parcel. The tensors are in memory that must not be written."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensors = {
                name: torch.from_numpy(array).view(dtype).view(shape)
                for array, (name, dtype, shape) in zip(self.arrays, self.layouts, strict=True)
            }
        return WeightBucket(self.policy_version, tensors, self.specs, self.kept)


class ObjectTransport(WeightTransport):
    """Tensors as bytes in Ray's object store, which each node fetches once: neither memory nor files are shared."""

    def pack(self, bucket: WeightBucket, slot: int) -> Parcel:
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.tensors.items()}
        return ObjectParcel(
            bucket.policy_version,
            tuple(tensor.flatten().view(torch.uint8).numpy() for tensor in own.values()),
            tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()),
            bucket.specs,
            bucket.kept,
        )
