"""The training backend over VeOmni's parallel plan: FSDP2 and HSDP as VeOmni applies them, all else as FSDPBackend."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unirl.train.backend.build import Blocks, Sharding
from unirl.train.backend.fill import local_box
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.ties import ties_of
from unirl.train.backend.veomni_rules import layers_stay_whole, version_problem
from unirl.train.backend.wrap import Divided, cast_inputs, shard_experts
from unirl.train.configs import FSDPConfig, TrainTopology
from unirl.train.shards import local_part
from unirl.types.errors import ConfigError

VEOMNI_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class VeOmniBackend(FSDPBackend):
    """FSDPBackend whose modules are sharded by VeOmni (github.com/ByteDance-Seed/VeOmni), over its device mesh.

    One device that computes in float32 shards nothing, as VeOmni does. Tokens and experts are spread over the axes sp
    and ep by the families' own plans: VeOmni's Ulysses and fused experts are part of its own model classes, and bundles
    have those of transformers and diffusers.

    Raises ConfigError, besides what FSDPBackend raises, for a version of VeOmni that is not tested, and on a machine
    with an accelerator that is not `device`: VeOmni would take it.
    """

    recipe_rules: ClassVar[str] = "unirl.train.backend.veomni_rules"
    """Those of FSDPBackend hold too."""

    def _sharding(self, topology: TrainTopology) -> Sharding:
        if (problem := version_problem()) is not None:
            raise ConfigError(problem)
        if topology.tp > 1:
            raise ConfigError(layers_stay_whole("topology", topology.tp))
        return partial(shard_by_veomni, topology=topology, config=self._config, device=self.device)

    def close(self) -> None:
        """Destroy the process group where the backend made one, and VeOmni's meshes over it. Safe to call twice."""
        if self._model.owns_process_group:
            _veomni("distributed.parallel_state").clear_parallel_state()
        super().close()


def shard_by_veomni(
    modules: Mapping[str, nn.Module],
    blocks: Blocks,
    divided: Divided,
    *,
    topology: TrainTopology,
    config: FSDPConfig,
    device: torch.device,
) -> list[FSDPModule]:
    """Shard each component and its blocks over VeOmni's mesh of `topology`, in place; returns the roots.

    Experts that are spread over ranks are cut and sharded as FSDPBackend does: VeOmni's own plan leaves each rank plain
    tensors of its experts, which no checkpoint or push could put together.
    """
    states = _veomni("distributed.parallel_state")
    taken = _veomni("utils.device").get_device_type()
    if taken != device.type:
        raise ConfigError(
            f"VeOmni takes the {taken} of this machine, but device is {device}. Take "
            f"unirl.train.backend.fsdp.FSDPBackend here, whose shards are the same, or set device: {taken}."
        )
    axes = topology.resolved(dist.get_world_size())
    state = states.init_parallel_state(
        dp_size=axes.dp,
        dp_replicate_size=axes.dp_replicate,
        dp_shard_size=axes.dp_shard,
        ulysses_size=axes.sp,
        dp_mode="fsdp2",
        device_type=device.type,
        name=None,
    )
    held = {name: _values(module) for name, module in modules.items()}
    shard_experts(divided.experts, topology, config, device)
    with states.use_parallel_state(state):
        roots = [_sharded(module, blocks[name], config) for name, module in modules.items()]
    for name, module in modules.items():
        _put_back(module, held[name])
    return roots


def _sharded(module: nn.Module, blocks: Sequence[nn.Module], config: FSDPConfig) -> FSDPModule:
    # Its build_parallelize_model would also make frozen weights float32, and shard nothing on one device in bf16.
    root = _veomni("distributed.torch_parallelize").parallelize_model_fsdp2(
        module,
        enable_reshard_after_forward=config.reshard_after_forward,
        mixed_precision=_veomni("arguments").MixedPrecisionConfig(
            param_dtype=VEOMNI_DTYPES[config.param_dtype],
            reduce_dtype=VEOMNI_DTYPES[config.reduce_dtype],
            cast_forward_inputs=False,
        ),
        basic_modules=sorted({type(block).__name__ for block in blocks}),
        should_skip_hf_weight_load=True,
        init_device="meta",
        enable_fsdp_offload=config.cpu_offload,
    )
    cast_inputs(module, config)
    return root


class _Values(NamedTuple):
    """What a module holds before VeOmni leaves new tensors without values, and tied parameters apart."""

    tensors: dict[str, Tensor]
    """Parameters, each once, and buffers by name, in host memory. Those of the meta device have no value."""
    ties: dict[str, str]
    """Other names of a parameter -> its first."""


def _values(module: nn.Module) -> _Values:
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Values alone: FSDP moves what it shards to the device, and a parameter that is kept would stay there whole.
    return _Values({name: each.detach().to("cpu") for name, each in every.items() if not each.is_meta}, ties_of(module))


@torch.no_grad()
def _put_back(module: nn.Module, values: _Values) -> None:
    """Give the shards and buffers of `module` their values, and tie what was tied."""
    new = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, whole in values.tensors.items():
        local_part(new[name]).copy_(whole[local_box(new[name])])
    for name, other in values.ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, new[other])


def _veomni(module: str) -> Any:  # Any: an optional library
    """A module of VeOmni, which at the level of its choice logs every block."""
    found = importlib.import_module(f"veomni.{module}")
    logging.getLogger("veomni").setLevel(logging.WARNING)
    return found
