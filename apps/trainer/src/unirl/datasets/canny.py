"""Edges of an image (Canny 1986), as ControlNets of edges were trained on. Legend: H W pixels, C channels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LOW, HIGH = 100, 200
"""Thresholds of |dx| + |dy| under Sobel's 3 x 3 filters: an edge begins above HIGH and goes on above LOW."""
STEEP = math.tan(math.radians(67.5))
FLAT = math.tan(math.radians(22.5))
_NEIGHBOURS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if (down, right) != (0, 0))


def canny(pixels_HWC: NDArray[np.uint8], low: int = LOW, high: int = HIGH) -> NDArray[np.bool_]:
    """Where the edges are, [H, W].

    The gradient is the channel's in which it is largest; at the border pixels repeat. The same pixels as OpenCV's
    Canny with its 3 x 3 aperture and L1 norm.
    """
    dx_HW, dy_HW = _gradient(pixels_HWC)
    size_HW = np.abs(dx_HW) + np.abs(dy_HW)
    is_thin_HW = (size_HW > low) & _is_ridge(dx_HW, dy_HW, size_HW)
    return _connected(is_thin_HW, is_thin_HW & (size_HW > high))


def edges_of(picture: Image.Image) -> Image.Image:
    """The edges of an image, white on black, of its size."""
    return Image.fromarray(canny(np.asarray(picture.convert("RGB"))))


def _gradient(pixels_HWC: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sobel's derivatives to the right and down."""
    padded = np.pad(pixels_HWC.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    across = padded[:, 2:] - padded[:, :-2]
    down = padded[2:] - padded[:-2]
    dx_HWC = across[:-2] + 2 * across[1:-1] + across[2:]
    dy_HWC = down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]
    largest = (np.abs(dx_HWC) + np.abs(dy_HWC)).argmax(axis=2)[..., None]
    dx_HW, dy_HW = (np.take_along_axis(each, largest, axis=2)[..., 0] for each in (dx_HWC, dy_HWC))
    return dx_HW, dy_HW


def _is_ridge(dx_HW: NDArray[np.int32], dy_HW: NDArray[np.int32], size_HW: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Where the gradient is largest along its own direction, of four. Of two equal neighbours one is kept."""
    padded = np.pad(size_HW, 1)
    height, width = size_HW.shape

    def beside(down: int, right: int) -> NDArray[np.int32]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    run, rise = np.abs(dx_HW), np.abs(dy_HW)
    is_falling = (dx_HW ^ dy_HW) >= 0
    return np.select(
        [rise < FLAT * run, rise > STEEP * run, is_falling],
        [
            (size_HW > beside(0, -1)) & (size_HW >= beside(0, 1)),
            (size_HW > beside(-1, 0)) & (size_HW >= beside(1, 0)),
            (size_HW > beside(-1, -1)) & (size_HW > beside(1, 1)),
        ],
        (size_HW > beside(-1, 1)) & (size_HW > beside(1, -1)),
    )


def _connected(is_thin_HW: NDArray[np.bool_], is_strong_HW: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Thin pixels that are joined to a strong one through thin pixels."""
    left = np.pad(is_thin_HW & ~is_strong_HW, 1)
    found = np.pad(is_strong_HW, 1)
    steps = np.array([down * left.shape[1] + right for down, right in _NEIGHBOURS])
    flat_left, flat_found = left.reshape(-1), found.reshape(-1)
    front = np.flatnonzero(flat_found)
    while front.size:
        reached = np.unique(front[:, None] + steps)
        front = reached[flat_left[reached]]
        flat_left[front] = False
        flat_found[front] = True
    return found[1:-1, 1:-1]
