"""Memory of the host that an accelerator copies from and to."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.types.devices import building_on, has_values, is_accelerator


def host_memory(like: Tensor) -> Tensor:
    """Uninitialised memory of the host for a tensor; pinned where an accelerator copies from and to it."""
    is_pinned = is_accelerator(like.device) and has_values(like.device)
    with building_on("cpu", of=like.device) as place:
        return torch.empty(like.shape, dtype=like.dtype, device=place, pin_memory=is_pinned)


def has_streams(device: torch.device) -> bool:
    """True if copies of a device run while it computes."""
    return is_accelerator(device) and has_values(device)
