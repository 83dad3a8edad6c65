"""From the modules of a bundle to what trains: adapters, dtypes, device, equal starting values, then shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import noop_context_fn

from unirl.train.backend.activation_offload import offload_activations
from unirl.train.backend.masters import Masters
from unirl.train.backend.recompute import selective
from unirl.train.backend.rules import layers_kept
from unirl.train.backend.wrap import (
    Divided,
    cast_inputs,
    checkpoint_activations,
    compile_blocks,
    ensure_process_group,
    find_blocks,
)
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.lora import inject_lora, is_empty
from unirl.train.nf4 import quantise_frozen
from unirl.train.precision import check_frozen_dtype, keep_in
from unirl.types.errors import ConfigError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import (
    CutBlock,
    CutsLayers,
    ExpertExchange,
    LayerExchange,
    ModelBundle,
    RecomputeContexts,
    RecomputesBlocks,
    SpreadsExperts,
    SpreadsTokens,
    TokenExchange,
)
from unirl.types.weights import AdapterConfig

Blocks = Mapping[str, Sequence[nn.Module]]
"""The blocks of each component."""
Sharding = Callable[[Mapping[str, nn.Module], Blocks, Divided], list[FSDPModule]]
"""sharding(components, blocks, divided) shards, in place and over the ranks of the process group, the components, their
blocks, and what is divided inside. Returns one root per component."""


class Wrapped(NamedTuple):
    """What became of the modules."""

    roots: list[FSDPModule]
    """One per trainable component; none where nothing is sharded."""
    owns_process_group: bool
    """True if a process group of this process alone was made for them."""


def prepare_parameters(
    bundle: ModelBundle,
    modules: Mapping[str, nn.Module],
    config: FSDPConfig,
    lora: LoraConfig | None,
    device: torch.device,
) -> AdapterConfig | None:
    """Give `modules` adapters, in place, in the dtypes of `config`; ranks take rank 0's values.

    Modules on the meta device stay there until they are filled (`unirl.train.backend.fill`). Of others, what trains
    moves to the device, and the rest too where nothing is sharded: else `wrap` moves it block by block, so that a
    device need never hold the whole model.

    Returns what the tensors of the adapters do not say, None without them. Raises ConfigError for options that do not
    fit the model.
    """
    adapter = None
    if not is_sharding(config):
        for module in modules.values():
            if not is_empty(module):
                module.to(device)
    if lora is not None:
        targets = tuple(bundle.lora_target_modules if lora.target_modules is None else lora.target_modules)
        inject_lora(modules, lora, targets, is_fused=config.param_dtype != "fp32")
        adapter = AdapterConfig(lora.rank, lora.alpha, targets)
    trainable = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError(f"no parameter of {', '.join(modules) or 'the bundle'} requires a gradient")
    filled = [parameter for parameter in trainable if not parameter.is_meta]
    for parameter in filled:
        parameter.data = parameter.data.to(device)
    keep_in(trainable, dtype_named(config.master_dtype, "fsdp.master_dtype"))
    check_frozen_dtype(modules.items(), config.param_dtype)
    if lora is not None and lora.base == "nf4":
        quantise_frozen({name: find_blocks(name, module, bundle.block_class_names) for name, module in modules.items()})
    if dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in filled:
            dist.broadcast(parameter.data, src=0)
    return adapter


def wrap(
    bundle: ModelBundle,
    modules: Mapping[str, nn.Module],
    config: FSDPConfig,
    sharding: Sharding,
    device: torch.device,
    exchange: TokenExchange | None,
    of_experts: ExpertExchange | None = None,
    of_layers: LayerExchange | None = None,
) -> Wrapped:
    """Spread tokens and experts, divide layers, checkpoint, compile and shard the blocks of `modules`, in place, as
    configured.

    exchange: of the ranks that each have a part of the tokens of the same samples; None where each has all. of_experts,
    of_layers: of the ranks that have the experts, or the layers, together; None where each has all. sharding: called
    where there is something to shard.
    """
    divided = Divided(
        experts=[] if of_experts is None else spread_experts(bundle, config, of_experts),
        layers=[] if of_layers is None else cut_layers(bundle, of_layers),
    )
    contexts = bundle.recompute_contexts if isinstance(bundle, RecomputesBlocks) else None
    if exchange is not None:
        contexts = spread_tokens(bundle, config, exchange)
    if config.compile and config.activation_checkpointing and contexts is not None:
        raise ConfigError(
            f"fsdp.compile: true with fsdp.activation_checkpointing: {type(bundle).__name__} has blocks that read more "
            "than their inputs, which a compiled block cannot recompute. Set one of them to false."
        )
    if config.activation_checkpointing == "selective":
        contexts = selective(contexts or noop_context_fn, is_compiled=config.compile)
    blocks = {name: find_blocks(name, module, bundle.block_class_names) for name, module in modules.items()}
    for found in blocks.values():
        if config.activation_checkpointing:
            checkpoint_activations(found, contexts)
        if config.activation_offload:
            offload_activations(found, device)
        if config.compile:
            compile_blocks(found)
    if not is_sharding(config):
        return Wrapped([], owns_process_group=False)
    owns_process_group = ensure_process_group(device)
    return Wrapped(sharding(modules, blocks, divided), owns_process_group)


def compute_in(modules: Mapping[str, nn.Module], config: FSDPConfig) -> Masters:
    """Let `modules`, which are not sharded and have their values, compute in `param_dtype`, in place."""
    dtype = dtype_named(config.param_dtype, "fsdp.param_dtype")
    if dtype != torch.float32:
        for module in modules.values():
            cast_inputs(module, config)
    return Masters(modules, dtype)


def spread_tokens(bundle: ModelBundle, config: FSDPConfig, exchange: TokenExchange) -> RecomputeContexts:
    """Let `bundle` spread its tokens. Raises ConfigError if it cannot, or not with these options."""
    if not isinstance(bundle, SpreadsTokens):
        raise ConfigError(
            f"topology.sp = {exchange.size}: the tokens of {type(bundle).__name__} cannot be spread over ranks. Set "
            "topology.sp: 1."
        )
    if config.compile:
        raise ConfigError(
            f"fsdp.compile compiles blocks without the exchange of topology.sp = {exchange.size}. Set fsdp.compile: "
            "false, or topology.sp: 1."
        )
    return bundle.spread_tokens(exchange)


def spread_experts(bundle: ModelBundle, config: FSDPConfig, exchange: ExpertExchange) -> Sequence[nn.Module]:
    """Let `bundle` spread its experts; modules of stacks of them. Raises ConfigError if it cannot, or not with these
    options."""
    if not isinstance(bundle, SpreadsExperts):
        raise ConfigError(
            f"topology.ep = {exchange.size}: {type(bundle).__name__} has no experts that can be spread over ranks. Set "
            "topology.ep: 1."
        )
    if config.compile:
        raise ConfigError(
            f"fsdp.compile compiles blocks without the exchange of topology.ep = {exchange.size}. Set fsdp.compile: "
            "false, or topology.ep: 1."
        )
    return bundle.spread_experts(exchange)


def cut_layers(bundle: ModelBundle, exchange: LayerExchange) -> Sequence[CutBlock]:
    """Let `bundle` divide its layers among ranks. Raises ConfigError if it cannot."""
    if not isinstance(bundle, CutsLayers):
        raise ConfigError(layers_kept(f"topology.tp = {exchange.size}", type(bundle).__name__))
    return bundle.cut_layers(exchange)


def is_sharding(config: FSDPConfig) -> bool:
    """True if FSDP wraps the model: one device has nothing to shard, and hooks cost time."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return not is_alone or config.cpu_offload
