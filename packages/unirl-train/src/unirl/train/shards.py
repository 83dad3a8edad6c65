"""This rank's part of a tensor that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor as `like` with another part of this rank, on whatever device that is; `local` itself where `like` is no
    DTensor. `DTensor.from_local` would move it to the devices of the mesh."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local
