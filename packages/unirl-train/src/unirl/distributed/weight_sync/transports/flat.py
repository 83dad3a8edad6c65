"""A bucket of weights whose tensors lie in one buffer of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.types.bucket_files import BucketLayout
from unirl.types.weights import WeightBucket


@dataclass(frozen=True)
class FlatBucket:
    """A bucket whose tensors lie in a buffer."""

    head: WeightBucket
    """The bucket without its tensors."""
    layout: BucketLayout
    """Positions of the tensors."""

    @classmethod
    def of(cls, bucket: WeightBucket) -> Self:
        """The layout of a bucket's tensors."""
        return cls(bucket.with_tensors({}), BucketLayout.of(bucket.tensors))

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.layout.num_bytes

    def read(self, buffer: Tensor) -> WeightBucket:
        """The bucket in a buffer; its tensors share the buffer's memory."""
        return self.head.with_tensors(self.layout.views(buffer))


def roomy(buffer: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """`buffer` if it holds `num_bytes`, else a new one, uint8 on the device."""
    if buffer is not None and buffer.numel() >= num_bytes:
        return buffer
    return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
