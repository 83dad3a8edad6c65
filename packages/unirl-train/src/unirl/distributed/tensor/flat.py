"""Packs named tensors into one byte buffer, which can be shared, sent or stored as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes. Every dtype can be viewed at multiples of it, and copies are aligned to cache lines."""


@dataclass(frozen=True)
class FlatLayout:
    """Positions of tensors in a buffer."""

    spans: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]
    """Name, dtype, shape, start and stop of each tensor, in bytes."""
    num_bytes: int
    """Size of the buffer."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The layout of these tensors, in order."""
        spans, start = [], 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            spans.append((name, tensor.dtype, tuple(tensor.shape), start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(spans), start)

    def write(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy the tensors into a buffer, uint8 [at least num_bytes]."""
        for name, place in self.views(buffer).items():
            place.copy_(tensors[name])

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer; they share its memory."""
        return {name: buffer[start:stop].view(dtype).view(shape) for name, dtype, shape, start, stop in self.spans}
