"""Modules whose parameters are on the meta device get their values: each rank reads the shards that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # what DCP cuts its reads by

from unirl.train.backend.collectives import gathered_of_all
from unirl.train.configs import LoraConfig
from unirl.train.lora import BASE_LAYER, adapter_layers, factors_as_drawn, plain_base_name
from unirl.train.shards import local_part
from unirl.types.errors import CheckpointError
from unirl.types.protocols.models import StoredTensor

T = TypeVar("T")
Stored = Mapping[str, StoredTensor]
Place = tuple[str, nn.Module]


@torch.no_grad()
def fill(
    modules: Mapping[str, nn.Module],
    stored: Mapping[str, Stored],
    lora: LoraConfig | None,
    *,
    shards_on: torch.device,
    buffers_on: torch.device,
) -> None:
    """Give the components of `stored` their values, in place: new parameters with the shards of this rank, saved
    buffers, and adapters as if they had been drawn when they were injected. Tied parameters stay tied.

    One tensor at a time, so that no more than the largest of them is held besides the shards. Raises CheckpointError on
    all ranks if any cannot read.
    """
    found = {component: modules[component] for component in stored}
    on_every_rank(lambda: _read_all(found, stored, shards_on, buffers_on))
    if lora is not None:
        for module in found.values():
            _draw_adapters(module, lora, shards_on)


def on_every_rank(action: Callable[[], T]) -> T:
    """What `action` returns; CheckpointError on all ranks where it cannot read on any."""
    problem: str | None = None
    result: T | None = None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    except (OSError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems: list[str | None] = gathered_of_all(problem)
    texts = {text for text in problems if text is not None}
    if len(texts) == 1 and None not in problems:
        raise CheckpointError(texts.pop())
    if texts:
        raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
    return result  # ty: ignore[invalid-explicit-return] - without a problem there is a result


def local_box(tensor: Tensor) -> tuple[slice, ...]:
    """What this rank keeps of a parameter: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _read_all(
    modules: Mapping[str, nn.Module],
    stored: Mapping[str, Stored],
    shards_on: torch.device,
    buffers_on: torch.device,
) -> None:
    for component, module in modules.items():
        for parameter, places in _places(module).items():
            plain = plain_base_name(places[0][0])
            new = nn.Parameter(torch.empty_like(parameter, device=shards_on), parameter.requires_grad)
            if plain is None:
                local_part(new).zero_()  # the factors of adapters, which are drawn later
            else:
                local_part(new).copy_(stored[component][plain].read(local_box(parameter)))
            for path, owner in places:
                setattr(owner, path.rpartition(".")[2], new)
        for path, buffer in module.named_buffers():
            where = stored[component].get(path.replace(BASE_LAYER, "."))
            if where is not None:
                owner, _, name = path.rpartition(".")
                value = torch.empty_like(buffer, device=buffers_on)
                setattr(module.get_submodule(owner), name, value.copy_(where.read(local_box(buffer))))


def _places(module: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Every parameter with its name and owner, several where it is tied."""
    found: dict[nn.Parameter, list[Place]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append((path, module.get_submodule(path.rpartition(".")[0])))
    return found


def _draw_adapters(module: nn.Module, config: LoraConfig, device: torch.device) -> None:
    """Every rank draws the factors of one layer after the other, as injection does, and keeps its part of rank 0's."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    for layer in adapter_layers(module):
        for factor, drawn in factors_as_drawn(layer, config):
            value = drawn.to(device, factor.dtype)
            if not is_alone:
                dist.broadcast(value, src=0)
            local_part(factor).copy_(value[local_box(factor)])
