"""A push to an engine in a separate process through memory that holds one bucket after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from unirl.rollout.engine.child.messages import TakeWeights
from unirl.types.errors import ContractError
from unirl.types.shared_buckets import BucketWriter
from unirl.types.weights import WeightBucket


class SharedPush:
    """Writes each bucket where the last one was, which the process has loaded by then. Used as `PushedFiles`.

    folder: of the memory where `device` is a CPU.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        """Where the memory is."""
        self.num_bytes = 0
        """Bytes of the tensors that have arrived in this push."""
        self._memory = BucketWriter(folder, device)
        self._has_taken = False

    @property
    def keeps(self) -> bool:
        """True if a process that starts later can be sent all that was pushed: only as long as nothing was."""
        return not self._has_taken

    def begin(self) -> None:
        """Start a push."""
        self.num_bytes = 0

    def take(self, bucket: WeightBucket) -> Sequence[TakeWeights]:
        """Write a bucket. Gives what the process is told, which must answer before the next bucket.

        Raises WeightSyncError if the memory cannot be had or shared, ContractError for a bucket of changes.
        """
        if bucket.base_version is not None:
            raise ContractError("what changed since another push cannot be loaded alone; send all")
        self.num_bytes += bucket.num_bytes
        self._has_taken = True
        place = self._memory.write(bucket.tensors)
        return [TakeWeights(bucket.policy_version, place, bucket.num_bytes, list(bucket.specs))]

    def finish(self, version: int) -> None:
        """The process has loaded all."""
        del version
        self._memory.drop()
