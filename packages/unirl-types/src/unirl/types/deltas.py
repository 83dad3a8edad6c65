"""The elements of a tensor that differ from an earlier version of it, as bytes: what a push sends instead of it all.

    delta = element_delta(base, tensor).data     # None where it would be no smaller than the tensor
    with_delta(base, delta)                      # the tensor, bit for bit

Elements are compared and copied as bits, so that -0.0 is not 0.0 and a NaN equals itself. The bytes are: how many a gap
takes (1, 2 or 4), the gaps, and the elements. A gap counts the elements between one that travels and the next; where
that many do not fit, elements in between travel too, though they are as before. So a place costs about one byte where
one element in a hundred has changed, and two where one in ten thousand has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unirl.types.errors import WeightSyncError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype of the bits of an element, by its size in bytes."""
_GAP_SIZES = (1, 2, 4)


class ElementDelta(NamedTuple):
    """What differs between two tensors."""

    num_changed: int
    """Elements of which the bits differ."""
    data: Tensor | None
    """The delta, uint8 in host memory; None where it would be no smaller than the tensor."""


def element_delta(base: Tensor, tensor: Tensor) -> ElementDelta:
    """What makes `tensor` of `base`. Both are in host memory, of one shape and dtype."""
    old, new = _bits(base), _bits(tensor)
    changed = new != old
    num_changed, size = int(changed.count_nonzero()), new.element_size()
    if 1 + num_changed * (1 + size) >= new.nbytes:
        return ElementDelta(num_changed, None)
    places = changed.nonzero().flatten().numpy()
    gaps = np.diff(places, prepend=-1) - 1
    num_elements = {width: num_changed + int((gaps >> 8 * width).sum()) for width in _GAP_SIZES}
    num_bytes = {width: 1 + num * (width + size) for width, num in num_elements.items()}
    width = min(_GAP_SIZES, key=lambda width: num_bytes[width])
    if num_bytes[width] >= new.nbytes:
        return ElementDelta(num_changed, None)
    places = _with_those_between(places, gaps, 1 << 8 * width)
    gaps = (np.diff(places, prepend=-1) - 1).astype(f"<u{width}")
    parts = (np.array([width], np.uint8), gaps.view(np.uint8), new.numpy()[places].view(np.uint8))
    return ElementDelta(num_changed, torch.from_numpy(np.concatenate(parts)))


def with_delta(base: Tensor, delta: Tensor) -> Tensor:
    """The tensor of which `element_delta` made the delta, on the device of `base`, which stays as it is.

    Raises WeightSyncError for a delta that is not of such a tensor.
    """
    tensor = base.detach().clone(memory_format=torch.contiguous_format)
    put_delta(tensor, delta)
    return tensor


def put_delta(tensor: Tensor, delta: Tensor) -> None:
    """Write the elements of a delta into its base, which is contiguous. Raises as `with_delta`, with none written."""
    data, size = delta.cpu().numpy(), tensor.element_size()
    width = int(data[0]) if len(data) else 0
    num = (len(data) - 1) // (width + size)
    if width not in _GAP_SIZES or len(data) != 1 + num * (width + size):
        raise WeightSyncError(f"{len(data)} bytes are no delta of a tensor of {tensor.dtype}")
    if not num:
        return
    gaps, values = data[1 : 1 + num * width].view(f"<u{width}"), data[1 + num * width :]
    places = torch.from_numpy((gaps.astype(np.int64) + 1).cumsum() - 1)
    if int(places[-1]) >= tensor.numel():
        raise WeightSyncError(f"a delta reaches element {int(places[-1])} of a tensor of {tensor.numel()}")
    bits = _BITS[size]
    new = torch.from_numpy(values.copy()).view(bits)  # the copy is aligned
    tensor.detach().view(-1).view(bits)[places.to(tensor.device)] = new.to(tensor.device)


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, in one row."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])


def _with_those_between(places: np.ndarray, gaps: np.ndarray, reach: int) -> np.ndarray:
    """The places, and as many between them that none is further than `reach` from the one before it."""
    num_between = gaps // reach
    last = (places - 1 - gaps).repeat(num_between)
    ends = num_between.cumsum()
    nth = np.arange(len(last)) - (ends - num_between).repeat(num_between) + 1
    return np.sort(np.concatenate([places, last + nth * reach]))
