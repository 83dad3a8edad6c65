"""This rank's part of a tensor that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
