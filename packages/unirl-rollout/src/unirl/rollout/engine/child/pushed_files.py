"""The last push to an engine in separate processes, as files: whole, or the one before it with what changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from unirl.rollout.engine.child.messages import ReceiveWeights
from unirl.rollout.engine.push import refuse
from unirl.types.bucket_files import BucketFiles, BucketLayout
from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightBucket, WeightSpec, diff_specs


class PushedFiles:
    """Puts what arrives into files that the engine's processes read; they get whole tensors, however little arrives.

    pushed.begin()
    pushed.take(bucket)                      # for each; gives the files that are complete now
    pushed.finish(version)                   # the processes have loaded them

    folder: of the files. A file that a bucket came in is read where it is, if that is on the same file system; the next
    push must then bring all.
    """

    keeps: Final = True
    """True if a process that starts later can be sent all that was pushed."""
    device: Final = torch.device("cpu")
    """Where the files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = BucketFiles(folder)
        self._layouts: list[BucketLayout] = []
        self._specs: dict[str, WeightSpec] = {}
        self._numbers: dict[str, int] = {}
        """Tensor -> number of its file."""
        self._version: int | None = None
        """Version that the files have; None if some are not complete or not in this folder."""
        self._base: int | None = None
        self._outdated: list[set[str]] = []
        """Tensors of each file that a push of what changed has not come to yet."""
        self._is_own = True
        self._num_written = 0
        """Buckets of a push that brings all."""
        self.num_bytes = 0
        """Bytes of the tensors and deltas that have arrived in this push."""

    def begin(self) -> None:
        """Start a push."""
        self._base, self._version = self._version, None
        self._outdated = [{name for name, *_ in layout.spans} for layout in self._layouts]
        self._is_own = True
        self._num_written = self.num_bytes = 0

    def take(self, bucket: WeightBucket) -> list[ReceiveWeights]:
        """Put a bucket into files. Gives those that have all their tensors now.

        Raises WeightSyncError for changes since a version that the files do not have, and for tensors that they do not
        have or that come twice.
        """
        self.num_bytes += bucket.num_bytes
        return [self._written(bucket)] if bucket.base_version is None else self._updated(bucket)

    def finish(self, version: int) -> None:
        """The files have this version."""
        self._version = version if self._is_own else None

    def _written(self, bucket: WeightBucket) -> ReceiveWeights:
        number = self._num_written
        self._num_written += 1
        if number == 0:
            self._layouts, self._specs, self._numbers = [], {}, {}
        self._layouts.append(BucketLayout.of(bucket.tensors))
        self._specs.update({spec.name: spec for spec in bucket.specs})
        self._numbers.update({spec.name: number for spec in bucket.specs})
        path = bucket.file
        if path is None or os.stat(path).st_dev != os.stat(self._folder).st_dev:
            path = str(self._files.write(number, bucket.tensors))
        else:
            self._is_own = False
        return ReceiveWeights(bucket.policy_version, path, list(bucket.specs))

    def _updated(self, bucket: WeightBucket) -> list[ReceiveWeights]:
        if bucket.base_version != self._base:
            raise WeightSyncError(
                f"the push brings what changed since version {bucket.base_version}, which the engine has no files of; "
                "push again, and all is sent"
            )
        specs = (*bucket.specs, *bucket.kept)
        known = [self._specs[spec.name] for spec in specs if spec.name in self._specs]
        wrong = diff_specs(specs, known)
        refuse("a bucket is not of the tensors that the engine has", wrong or self._twice(specs))
        whole = {spec.name for spec in bucket.specs}
        for name, tensor in bucket.tensors.items():
            number = self._numbers[name]
            put = self._files.write_rows if name in whole else self._files.put_delta
            put(number, self._layouts[number], name, tensor)
        self._specs.update({spec.name: spec for spec in specs})
        for spec in specs:
            self._outdated[self._numbers[spec.name]].discard(spec.name)
        ready = sorted({self._numbers[spec.name] for spec in specs})
        return [self._message(number, bucket.policy_version) for number in ready if not self._outdated[number]]

    def _twice(self, specs: Sequence[WeightSpec]) -> list[str]:
        again = [spec.name for spec in specs if spec.name not in self._outdated[self._numbers[spec.name]]]
        return [f"twice: {name}" for name in again]

    def _message(self, number: int, version: int) -> ReceiveWeights:
        specs = [self._specs[name] for name, *_ in self._layouts[number].spans]
        return ReceiveWeights(version, str(self._files.path(number)), specs)
