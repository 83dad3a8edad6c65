"""Blocks of a model: found by class name, then checkpointed, compiled and sharded one by one, and the root last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from unirl.train.configs import FSDPConfig, TrainTopology
from unirl.train.lora import is_first_factor, is_second_factor, plain_base_name, plain_lora_name
from unirl.train.shards import local_part
from unirl.types.devices import collectives_of
from unirl.types.errors import ConfigError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import CutBlock, RecomputeContexts

ONE_RANK_TIMEOUT = timedelta(seconds=60)


class Divided(NamedTuple):
    """What ranks have together, each a part."""

    experts: Sequence[nn.Module] = ()
    """Modules that hold stacks of experts."""
    layers: Sequence[CutBlock] = ()


def find_blocks(component: str, module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Submodules whose class has one of the names, outermost first. Raises ConfigError if there is none."""
    blocks = [block for block in module.modules() if type(block).__name__ in class_names]
    if not blocks:
        existing = sorted({type(child).__name__ for child in module.modules()})
        raise ConfigError(
            f"{component} has no block of class {', '.join(class_names) or '(none named)'}, so it would be sharded as "
            f"one unit. Classes it has: {', '.join(existing)}. Correct the bundle's block_class_names."
        )
    return blocks


def checkpoint_activations(blocks: Sequence[nn.Module], contexts: RecomputeContexts | None = None) -> None:
    """Recompute each block's forward in the backward. Names in state dicts stay the same.

    contexts: what a forward and its recomputation are entered with; may keep some results (`recompute.selective`).

    The forward of the instance is replaced, not the module: a wrapper module would add its own name to every
    parameter. Nested blocks are recomputed with the outermost.
    """
    inside = {id(child) for block in blocks for child in block.modules() if child is not block}
    for block in blocks:
        if id(block) not in inside:
            block.forward = functools.partial(_recomputed, block.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: RecomputeContexts | None, *args: Any, **kwargs: Any) -> Any:
    # Any: arguments and results of any block. In our code, since Dynamo compiles no frame of torch.utils.checkpoint;
    # by position, since what goes by name is held as it is and not by way of the hooks of saved tensors.
    called, given = functools.partial(_named, forward, tuple(kwargs)), (*args, *kwargs.values())
    if contexts is None:
        return checkpoint(called, *given, use_reentrant=False)
    return checkpoint(called, *given, use_reentrant=False, context_fn=contexts)


def _named(forward: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """Call `forward`, the last arguments by these names. Any: as above."""
    num = len(given) - len(names)
    return forward(*given[:num], **dict(zip(names, given[num:], strict=True)))


def is_checkpointed(forward: Callable[..., object]) -> bool:
    """True for a forward that `checkpoint_activations` has replaced."""
    return isinstance(forward, functools.partial) and forward.func is _recomputed


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block at its first call; modules and parameter names stay the same."""
    for block in blocks:
        block.compile()


def ensure_process_group(device: torch.device) -> bool:
    """Form a group of this one process where none exists; whether it did. FSDP needs one even on a single device."""
    if dist.is_initialized():
        return False
    dist.init_process_group(
        collectives_of(device), store=dist.HashStore(), rank=0, world_size=1, timeout=ONE_RANK_TIMEOUT
    )
    return True


def sharding_mesh(topology: TrainTopology, device: torch.device) -> DeviceMesh:
    """One dimension that shards, or two (replicate, shard) where the topology has several replicas.

    Ranks that share samples (sp, tp) share the shards of the model too: each needs whole blocks for its own tokens, or
    whatever is not cut.
    """
    axes = topology.resolved(dist.get_world_size())
    return _mesh(device, dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard * axes.sp * axes.tp)


def mesh_of_experts(topology: TrainTopology, device: torch.device) -> DeviceMesh:
    """As `sharding_mesh`, its last dimension divided into the shards of a rank's experts and the ranks along "ep"."""
    axes = topology.resolved(dist.get_world_size())
    shard = axes.dp_shard * axes.sp // axes.ep
    return _mesh(device, dp_replicate=axes.dp_replicate, dp_shard=shard, ep=axes.ep)


def mesh_of_layers(topology: TrainTopology, device: torch.device) -> DeviceMesh:
    """As `sharding_mesh`, its last dimension divided into the shards of a rank's layers and the ranks along "tp"."""
    axes = topology.resolved(dist.get_world_size())
    return _mesh(device, dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard, tp=axes.tp)


def _mesh(device: torch.device, **sizes: int) -> DeviceMesh:
    """A mesh of these dimensions, without "dp_replicate" where there is one copy of the model."""
    kept = {name: size for name, size in sizes.items() if name != "dp_replicate" or size > 1}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def cut_experts(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Leave each rank along `mesh`, of one dimension, its part of the first dimension of the modules' parameters, in
    place."""
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _cut(module, name, parameter, mesh, 0)


def cut_linears(blocks: Sequence[CutBlock], mesh: DeviceMesh) -> None:
    """Leave each rank along `mesh`, of one dimension, its part of the linear layers of blocks and the whole of other
    parameters, in place."""
    for block in blocks:
        for path, parameter in list(block.module.named_parameters()):
            owner, _, name = path.rpartition(".")
            _cut(block.module.get_submodule(owner), name, parameter, mesh, cut_dim(block, path))


def cut_dim(block: CutBlock, path: str) -> int | None:
    """The dimension by which a parameter of a block is cut, adapters included; None of one that is whole on every
    rank: a rank's outputs need all of the factor A, and its inputs all of B."""
    layer = plain_base_name(path)
    if layer is None:
        layer = plain_lora_name(path).rpartition(".lora_")[0] + "."
    if layer.startswith(tuple(f"{name}." for name in block.rows)):
        return None if is_first_factor(path) else 0
    if layer.startswith(tuple(f"{name}." for name in block.columns)):
        return None if is_second_factor(path) else 1
    return None


def _cut(owner: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, dim: int | None) -> None:
    rank, size = mesh.get_local_rank(), mesh.size()
    own, placement = parameter.detach(), Replicate()
    if dim is not None:
        # A copy, or the whole stays in memory.
        own, placement = own.chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format), Shard(dim)
    cut = DTensor.from_local(own, mesh, [placement], run_check=False)
    setattr(owner, name, nn.Parameter(cut, parameter.requires_grad))


def shard_all(
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, Sequence[nn.Module]],
    divided: Divided,
    *,
    topology: TrainTopology,
    config: FSDPConfig,
    device: torch.device,
) -> list[FSDPModule]:
    """Shard spread experts and divided layers, then each component and its other blocks over the mesh of `topology`, in
    place; returns roots."""
    mesh = sharding_mesh(topology, device)
    shard_experts(divided.experts, topology, config, device)
    shard_layers(divided.layers, topology, config, device)
    return [shard(module, blocks[name], mesh, config) for name, module in modules.items()]


def shard_experts(
    experts: Sequence[nn.Module], topology: TrainTopology, config: FSDPConfig, device: torch.device
) -> None:
    """Leave each rank its part of the experts of modules that hold stacks of them, and shard each of these experts over
    the ranks with the same part, in place."""
    if not experts:
        return
    mesh = mesh_of_experts(topology, device)
    cut_experts(experts, mesh["ep"])
    over = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "ep")]
    for module in experts:
        fully_shard(
            module,
            mesh=over,
            mp_policy=_precision(config),
            offload_policy=_offload(config),
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=functools.partial(_within_experts, over.size(over.ndim - 1)),
        )


def shard_layers(blocks: Sequence[CutBlock], topology: TrainTopology, config: FSDPConfig, device: torch.device) -> None:
    """Leave each rank its part of the layers of blocks, and shard it over the ranks with the same part, in place."""
    if not blocks:
        return
    mesh = mesh_of_layers(topology, device)
    cut_linears(blocks, mesh["tp"])
    over = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    for block in reversed(blocks):
        fully_shard(
            block.module,
            mesh=over,
            mp_policy=_precision(config),
            offload_policy=_offload(config),
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=functools.partial(_across_the_cut, over.size(over.ndim - 1)),
        )


def shard(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, config: FSDPConfig) -> FSDPModule:
    """Shard each block and then the rest of `module`, in place.

    Inputs are cast at the root alone (`cast_inputs`): blocks get theirs as they are, since rotary tables are float32 by
    design.
    """
    for block in (each for each in reversed(blocks) if not isinstance(each, FSDPModule)):
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=_precision(config),
            offload_policy=_offload(config),
            reshard_after_forward=config.reshard_after_forward,
        )
    root = fully_shard(module, mesh=mesh, mp_policy=_precision(config), offload_policy=_offload(config))
    cast_inputs(module, config)
    return root


def cast_inputs(module: nn.Module, config: FSDPConfig) -> None:
    """Let `module` compute as if loaded in `param_dtype`, with one exception to FSDP's habit: inputs of rank 1 (noise
    levels of rows) and timesteps, be they of rows or of tokens, keep float32. bfloat16 would round timestep 963.7 to
    964."""
    dtype = dtype_named(config.param_dtype, "fsdp.param_dtype")
    module.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)


def _precision(config: FSDPConfig) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=dtype_named(config.param_dtype, "fsdp.param_dtype"),
        reduce_dtype=dtype_named(config.reduce_dtype, "fsdp.reduce_dtype"),
        cast_forward_inputs=False,
    )


def _offload(config: FSDPConfig) -> OffloadPolicy:
    return CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()


def _within_experts(num_shards: int, parameter: nn.Parameter) -> Shard:
    """Each expert is cut, so that any number of ranks may have a part of it. Raises ConfigError if none of its sides
    divides."""
    for dim in range(1, parameter.dim()):
        if parameter.shape[dim] % num_shards == 0:
            return Shard(dim)
    raise ConfigError(
        f"experts of shape {list(parameter.shape[1:])} do not divide into {num_shards} shards. Change "
        "topology.ep, so that the devices of a copy of the model are another multiple of it."
    )


def _across_the_cut(num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """Parameters are sharded along another dimension than ranks have cut them by, where it divides; vectors along the
    same. Raises ConfigError if neither divides."""
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    if not isinstance(placement, Shard):
        return None
    local = local_part(parameter).shape
    for dim in (*(each for each in range(len(local)) if each != placement.dim), placement.dim):
        if local[dim] % num_shards == 0:
            return Shard(dim)
    raise ConfigError(
        f"a rank's part {list(local)} of a layer does not divide into {num_shards} shards. Change topology.tp or "
        "dp_shard."
    )


def reshard(modules: Mapping[str, nn.Module]) -> None:
    """Drop gathered copies of parameters, which do not follow a change of the shards."""
    for module in modules.values():
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # Any: arguments of any model
    return (
        tuple(_cast(dtype, value) for value in args),
        {name: value if name.startswith("timestep") else _cast(dtype, value) for name, value in kwargs.items()},
    )


def _cast(dtype: torch.dtype, value: Any) -> Any:  # Any: as above
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
        return value.to(dtype)
    return value
