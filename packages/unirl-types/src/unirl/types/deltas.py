"""The elements of a tensor that differ from an earlier version of it, as bytes: what a push sends instead of it all.

    delta = element_delta(base, tensor).data     # None where it would be no smaller than the tensor
    with_delta(base, delta)                      # the tensor, bit for bit

Elements are compared and copied as bits, so that -0.0 is not 0.0 and a NaN equals itself. The first byte says how
places are written: 0, a bit for each element of the tensor; 1, 2 or 4, gaps of so many bytes, the number of elements
between one that travels and the next. Where a gap does not fit, elements in between travel too, though they are as
before. Places come next, and then the elements. What takes the fewest bytes is chosen: bits where more than an eighth
has changed, and gaps of one byte where one element in a hundred has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unirl.types.devices import INTEGERS, is_accelerator
from unirl.types.errors import WeightSyncError

"""Dtype of the bits of an element, by its size in bytes."""
_GAP_SIZES = (1, 2, 4)
_BITMAP = 0
"""First byte of a delta whose places are bits."""


class ElementDelta(NamedTuple):
    """What differs between two tensors."""

    num_changed: int
    """Elements of which the bits differ."""
    data: Tensor | None
    """The delta, uint8 in host memory; None where it would be no smaller than the tensor."""


def element_delta(base: Tensor, tensor: Tensor) -> ElementDelta:
    """What makes `tensor` of `base`, of one shape and dtype. They are compared where `tensor` is, and of that only what
    has changed comes to the host.
    """
    new = _bits(tensor)
    changed = new != _bits(base).to(new.device)
    num_changed, size = int(changed.count_nonzero()), new.element_size()
    if 1 + num_changed * size >= new.nbytes:
        return ElementDelta(num_changed, None)
    places = changed.nonzero().squeeze(1).cpu().numpy()
    gaps = np.diff(places, prepend=-1) - 1
    num_bytes = {width: (num_changed + int((gaps >> 8 * width).sum())) * (width + size) for width in _GAP_SIZES}
    num_bytes[_BITMAP] = -(-new.numel() // 8) + num_changed * size
    written = min(num_bytes, key=num_bytes.__getitem__)
    if 1 + num_bytes[written] >= new.nbytes:
        return ElementDelta(num_changed, None)
    if written == _BITMAP:
        said = np.packbits(changed.cpu().numpy())
    else:
        places = _with_those_between(places, gaps, 1 << 8 * written)
        said = (np.diff(places, prepend=-1) - 1).astype(f"<u{written}").view(np.uint8)
    values = new[torch.from_numpy(places).to(new.device)].cpu().numpy()
    parts = (np.array([written], np.uint8), said, values.view(np.uint8))
    return ElementDelta(num_changed, torch.from_numpy(np.concatenate(parts)))


def on_host(deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The deltas in host memory, where they are read; those of a device by one copy. All are on one device."""
    if not any(is_accelerator(delta.device) for delta in deltas.values()):
        return dict(deltas)
    together = torch.cat(list(deltas.values())).cpu()
    return dict(zip(deltas, together.split([len(delta) for delta in deltas.values()]), strict=True))


def with_delta(base: Tensor, delta: Tensor) -> Tensor:
    """The tensor of which `element_delta` made the delta, on the device of `base`, which stays as it is.

    Raises WeightSyncError for a delta that is not of such a tensor.
    """
    tensor = base.detach().clone(memory_format=torch.contiguous_format)
    put_delta(tensor, delta)
    return tensor


def put_delta(tensor: Tensor, delta: Tensor) -> None:
    """Write the elements of a delta into its base. Raises as `with_delta`, with none written."""
    if not tensor.is_contiguous():
        tensor.copy_(with_delta(tensor, delta))
        return
    data, size = delta.cpu().numpy(), tensor.element_size()
    found = _places(data, tensor.numel(), size)
    if found is None:
        raise WeightSyncError(f"{len(data)} bytes are no delta of a tensor of {tensor.numel()} {tensor.dtype}")
    places, values = found
    if len(places):
        bits = INTEGERS[size]
        new = torch.from_numpy(values.copy()).view(bits)  # the copy is aligned
        tensor.detach().view(-1).view(bits)[torch.from_numpy(places).to(tensor.device)] = new.to(tensor.device)


def _places(data: np.ndarray, num_elements: int, size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Places of the elements in a delta and their bytes, of `size` each; None where it is of no such tensor."""
    written = int(data[0]) if len(data) else None
    if written == _BITMAP:
        end = 1 + -(-num_elements // 8)
        is_there = np.unpackbits(data[1:end])
        places = is_there.nonzero()[0]
    elif written in _GAP_SIZES:
        end = 1 + (len(data) - 1) // (written + size) * written
        places = (data[1:end].view(f"<u{written}").astype(np.int64) + 1).cumsum() - 1
    else:
        return None
    fits = len(data) == end + len(places) * size and (not len(places) or places[-1] < num_elements)
    return (places, data[end:]) if fits else None


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, in one row."""
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])


def _with_those_between(places: np.ndarray, gaps: np.ndarray, reach: int) -> np.ndarray:
    """The places, and as many between them that none is further than `reach` from the one before it."""
    num_between = gaps // reach
    if not num_between.any():
        return places
    last = (places - 1 - gaps).repeat(num_between)
    ends = num_between.cumsum()
    nth = np.arange(len(last)) - (ends - num_between).repeat(num_between) + 1
    return np.sort(np.concatenate([places, last + nth * reach]))
