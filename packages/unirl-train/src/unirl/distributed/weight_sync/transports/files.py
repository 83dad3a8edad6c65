"""Buckets as files that trainer and engines can read: in one machine's memory, or in a folder that several share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unirl.distributed.weight_sync.plan import Piece, PlannedBucket
from unirl.distributed.weight_sync.transports.base import Parcel, SlicingTransport
from unirl.types.bucket_files import BucketFiles, MappedBuckets
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.owned_folder import OwnedFolder
from unirl.types.weights import WeightBucket, WeightSpec

_KEPT = "files"
"""Key of a worker's mapped files."""


@dataclass(frozen=True)
class FileParcel(Parcel):
    """The path of a safetensors file, which an engine maps or passes to its own processes."""

    path: str | None
    """None if no tensor is sent."""
    head: WeightBucket
    """The bucket without its tensors."""
    remedy: str
    """Advice for the error if the file cannot be read."""
    is_lent: bool = True
    """True if an engine's own processes may read the file for as long as they have this push."""

    def opened(self, kept: dict[str, Any]) -> WeightBucket:  # Any: see Parcel
        """See Parcel. The tensors are in read-only memory."""
        if self.path is None:
            return self.head
        mapped: MappedBuckets = kept.setdefault(_KEPT, MappedBuckets())
        mapped.forget_removed()
        try:
            tensors = mapped.tensors(self.path)
        except WeightSyncError as error:
            raise WeightSyncError(f"version {self.head.policy_version}: {error} {self.remedy}") from error
        return replace(self.head.with_tensors(tensors), file=self.path if self.is_lent else None)


class FileTransport(SlicingTransport):
    """Writes each bucket over the file with the same number in the last push.

    folder: in one machine's memory, or on a file system that several share. remedy: advice if an engine cannot read it.
    lends_files: True if a file has what the engine is to keep until the next push brings all of it again; False if that
    may bring only what changed, in the same file.
    Raises ConfigError if the folder does not exist.
    """

    def __init__(self, folder: str, remedy: str, *, lends_files: bool = True) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"sync.transfer_dir = {folder!r} is no folder; make it, or name another")
        self._folder = folder
        self._remedy = remedy
        self._lends_files = lends_files
        self._own: tuple[OwnedFolder, BucketFiles] | None = None
        self._shared: tuple[str, BucketFiles] | None = None
        """Folder of rank 0, and this rank's view of its files."""

    def pack(self, bucket: WeightBucket, number: int) -> Parcel:
        """See WeightTransport. Raises WeightSyncError if there is no space."""
        _, files = self._opened()
        path = str(files.write(number, bucket.tensors)) if bucket.tensors else None
        return FileParcel(path, bucket.with_tensors({}), self._remedy, self._lends_files)

    def opened(self, rank: int) -> str | None:
        """The folder of rank 0; None on other ranks."""
        return str(self._opened()[0].path) if rank == 0 else None

    def join(self, opened: Sequence[Any]) -> None:  # Any: see SlicingTransport
        if self._shared is None or self._shared[0] != opened[0]:
            self._shared = opened[0], BucketFiles(Path(opened[0]))

    def begin(self, number: int, bucket: PlannedBucket) -> None:
        self._files.begin(number, bucket.layout)

    def write(self, number: int, bucket: PlannedBucket, piece: Piece, rows: Tensor) -> None:
        self._files.write_rows(number, bucket.layout, piece.name, rows, piece.start)

    def parcel(self, number: int, version: int, bucket: PlannedBucket, specs: Sequence[WeightSpec]) -> Parcel:
        return FileParcel(str(self._files.path(number)), WeightBucket(version, {}, tuple(specs)), self._remedy)

    def drop(self) -> None:
        self._shared = None
        if self._own is not None:
            self._own[0].remove()
            self._own = None

    def _opened(self) -> tuple[OwnedFolder, BucketFiles]:
        if self._own is None:
            folder = OwnedFolder("unirl-push-", self._folder)
            self._own = folder, BucketFiles(folder.path)
        return self._own

    @property
    def _files(self) -> BucketFiles:
        """Files of the current push."""
        if self._shared is None:
            raise WeightSyncError("no push is under way: join comes first, and again after a failure")
        return self._shared[1]
