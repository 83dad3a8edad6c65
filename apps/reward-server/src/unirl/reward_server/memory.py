"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt(3)."""
_KEPT_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB for the next request, where the C library is glibc.

    Else every batch of pictures gets fresh pages from the system, and to have them cleared costs four times what
    turning its bytes into floats costs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
