"""What ranks that train together tell each other, losses and gradients aside."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from unirl.types.errors import ContractError
from unirl.types.roles import Axis, MeshPlace


class RankCollectives:
    """Implements unirl.types.protocols.training.Collectives. is_sharded: whether ranks share the model's shards.

    Every rank of the world makes one: process groups are formed inside where ranks share samples, or have experts
    together.
    """

    def __init__(self, place: MeshPlace, device: torch.device, *, is_sharded: bool) -> None:
        sharing = place.sp_size * place.tp_size
        num_ranks = place.dp_size * sharing
        self._sizes: dict[Axis, int] = {
            "dp": place.dp_size,
            "sp": place.sp_size,
            "heads": place.sp_size // place.ring_size,
            "ring": place.ring_size,
            "tp": place.tp_size,
            "ep": place.ep_size,
            "all": num_ranks,
        }
        self._device = device
        self._is_sharded = is_sharded
        self._groups: dict[Axis, dist.ProcessGroup | None] = dict.fromkeys(self._sizes)
        if sharing > 1:
            axis: Axis = "sp" if place.sp_size > 1 else "tp"
            mesh = init_device_mesh(device.type, (place.dp_size, sharing), mesh_dim_names=("dp", axis))
            self._groups |= {"dp": mesh.get_group("dp"), axis: mesh.get_group(axis)}
        if place.ring_size > 1:
            sizes = (place.dp_size, self._sizes["ring"], self._sizes["heads"])
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "ring", "heads"))
            self._groups |= {"ring": mesh.get_group("ring"), "heads": mesh.get_group("heads")}
        if place.ep_size > 1:
            sizes = (num_ranks // place.ep_size, place.ep_size)
            self._groups["ep"] = init_device_mesh(device.type, sizes, mesh_dim_names=("groups", "ep")).get_group("ep")

    def size(self, axis: Axis) -> int:
        """Number of ranks of an axis."""
        return self._sizes[axis]

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The ranks of an axis. Raises ContractError without a process group."""
        found = self._groups[axis] or dist.group.WORLD
        if found is None:
            raise ContractError(f"there is no process group, so none of the axis {axis}")
        return found

    def all_reduce_sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Sum over the ranks of an axis; the tensor itself where there is one."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, axis)

    def all_reduce_max(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Maximum over the ranks of an axis; the tensor itself where there is one."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, axis)

    def any_rank(self, value: bool) -> bool:
        """True if `value` is true on any rank; `value` itself where the model is not sharded. Every rank calls it; a
        collective inside where sharded."""
        if not self._is_sharded:
            return value
        return bool(self.all_reduce_max(torch.tensor(float(value), device=self._device), "all"))

    def gathered(self, value: Any) -> list[Any]:  # Any: JSON
        """The values of all ranks, in their order, as JSON brings them."""
        return [value] if self._sizes["all"] == 1 else gathered_of_all(value)

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, axis: Axis) -> Tensor:
        if self._sizes[axis] == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, op=operation, group=self._groups[axis])
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
