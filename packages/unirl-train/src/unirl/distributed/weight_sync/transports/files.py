"""Buckets as files in a folder that trainer and engines see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.distributed.weight_sync.transports.base import Parcel, WeightTransport
from unirl.distributed.weight_sync.transports.flat import FlatBucket, roomy
from unirl.types.errors import ConfigError, WeightSyncError, as_sentence
from unirl.types.owned_folder import OwnedFolder
from unirl.types.weights import WeightBucket


@dataclass(frozen=True)
class FileParcel(Parcel):
    """A path, and where the tensors lie in its bytes."""

    path: str
    bucket: FlatBucket

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        """See Parcel. One buffer is read into again and again: memory that is new takes longer than the copy."""
        num_bytes = self.bucket.num_bytes
        buffer = kept["files"] = roomy(kept.get("files"), num_bytes, torch.device("cpu"))
        try:
            with Path(self.path).open("rb") as file:
                num_read = file.readinto(memoryview(buffer.numpy())[:num_bytes])
        except OSError as error:
            raise self._unreadable(str(error)) from error
        if num_read != num_bytes:
            raise self._unreadable(f"it holds {num_read} bytes, expected {num_bytes}")
        return self.bucket.read(buffer)

    def _unreadable(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            f"a bucket of version {self.bucket.policy_version} cannot be read from {self.path}: {as_sentence(why)} Set "
            "sync.transfer_dir to a folder that what trains and the engines both see, or choose another "
            "sync.transport."
        )


class FileTransport(WeightTransport):
    """Writes each bucket into one of two files: pages that a file has are written faster than new ones.

    folder: where; memory-backed on one node, a shared file system between nodes. Raises ConfigError without it.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"sync.transfer_dir = {folder!r} is no folder; make it, or name another")
        self._folder = folder
        self._own: OwnedFolder | None = None

    def pack(self, bucket: WeightBucket, slot: int) -> Parcel:
        if self._own is None:
            self._own = OwnedFolder("unirl-push-", self._folder)
        path, flat = self._own.path / f"bucket-{slot}", FlatBucket.of(bucket)
        try:
            with path.open("r+b" if path.exists() else "wb") as file:
                for name, _, _, start, _ in flat.layout.spans:
                    file.seek(start)
                    own = bucket.tensors[name].detach().cpu().contiguous()
                    file.write(own.flatten().view(torch.uint8).numpy())
                if file.seek(0, 2) < flat.num_bytes:  # behind the last tensor, where the layout is rounded up
                    file.truncate(flat.num_bytes)
        except OSError as error:
            raise WeightSyncError(
                f"a bucket of {bucket.num_bytes / 1e6:.1f} MB cannot be written to {path}: {as_sentence(error)} "
                "Free space there, or set sync.transfer_dir or a smaller sync.bucket_bytes."
            ) from error
        return FileParcel(str(path), flat)

    def drop(self) -> None:
        if self._own is not None:
            self._own.remove()
            self._own = None
