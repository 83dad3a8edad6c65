"""What ranks that train together tell each other, losses and gradients aside."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unirl.types.roles import MeshPlace


class RankCollectives:
    """Implements unirl.types.protocols.training.Collectives. is_sharded: whether ranks share the model's shards."""

    def __init__(self, place: MeshPlace, device: torch.device, *, is_sharded: bool) -> None:
        self._dp_size = place.dp_size
        self._device = device
        self._is_sharded = is_sharded

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the data-parallel ranks; the tensor itself on one device."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over the data-parallel ranks; the tensor itself on one device."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def any_rank(self, value: bool) -> bool:
        """True if `value` is true on any rank; `value` itself where the model is not sharded. Every rank calls it; a
        collective inside where sharded."""
        if not self._is_sharded or self._dp_size == 1:
            return value
        return bool(self.all_reduce_max(torch.tensor(float(value), device=self._device)))

    def gathered(self, value: Any) -> list[Any]:  # Any: JSON
        """The values of all data-parallel ranks, in their order, as JSON brings them."""
        return [value] if self._dp_size == 1 else gathered_of_all(value)

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self._dp_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, op=operation)
        return total


def gathered_of_all(value: Any) -> list[Any]:  # Any: JSON
    """The values of all ranks of the process group, in their order, as JSON brings them; without a group the value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in _all_gathered(torch.tensor([len(text)]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = zip(_all_gathered(padded), lengths, strict=True)
    return [json.loads(bytes(each[:length].numpy())) for each, length in texts]


def _all_gathered(own: Tensor) -> list[Tensor]:
    """The tensors of all ranks, on the CPU and of one size."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found
