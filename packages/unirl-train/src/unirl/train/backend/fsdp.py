"""The training backend: trainable parameters, optimizer, named policies, on one device or sharded by FSDP2."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unirl.train.backend.auxiliary import AuxiliaryModule
from unirl.train.backend.policies import NamedPolicies
from unirl.train.backend.wrap import (
    checkpoint_activations,
    compile_blocks,
    data_parallel_mesh,
    ensure_process_group,
    find_blocks,
    reshard,
    shard,
)
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, LrSchedulerConfig, TrainTopology
from unirl.train.ema import EMA, float_copies
from unirl.train.lora import (
    adapters_disabled,
    inject_lora,
    is_adapted,
    lora_factor_names,
    merged_weight,
    plain_base_name,
    plain_lora_name,
)
from unirl.train.optim import clip_gradients, global_grad_norm, learning_rate_at, make_adamw, move_optimizer
from unirl.train.precision import check_frozen_dtype, keep_in
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import CheckpointError, ConfigError, ContractError, TrainingError
from unirl.types.precision import dtype_named
from unirl.types.protocols import ModelBundle
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.training import OptimizerConfig, StepStats
from unirl.types.weights import AdapterConfig

logger = logging.getLogger(__name__)

CURRENT_POLICY = "default"
EMA_POLICY = "ema"
REFERENCE_POLICY = "reference"
COUNTERS = ("num_optimizer_steps", "num_skipped_steps", "num_skipped_in_a_row", "num_ema_averages", "policy_version")


@bounded("backend")
class FSDPBackend:
    """Owns what trains: full fine-tuning, or LoRA with `lora`. Implements unirl.types.protocols.TrainBackend.

    On one device with param_dtype "fp32" nothing is wrapped: the model runs as it is. Otherwise every block and then
    the root of each trainable component is sharded by FSDP2 over the mesh of `topology` (one dimension, or HSDP with
    dp_replicate > 1); on one device, for mixed precision alone, over a process group of this process, which the backend
    makes and `close` destroys. Trainable parameters are kept in `fsdp.master_dtype`; ranks start from rank 0's.

    bundle: its trainable_modules() are changed in place. device: where they train. max_skipped_steps: steps in a row
    with a non-finite gradient norm after which TrainingError is raised. keep_reference: with full fine-tuning, keep a
    copy of the starting weights for `reference_policy` (LoRA needs none: its base is the reference).
    The state holds what changes: a frozen base and buffers are not part of it.
    Raises ConfigError for options that do not fit the model or the number of devices.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        optimizer: OptimizerConfig,
        scheduler: LrSchedulerConfig | None = None,
        fsdp: FSDPConfig | None = None,
        lora: LoraConfig | None = None,
        ema: EMAConfig | None = None,
        device: str | torch.device = "cpu",
        max_skipped_steps: PositiveInt = 3,
        topology: TrainTopology | None = None,
        keep_reference: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._bundle = bundle
        self._config = fsdp if fsdp is not None else FSDPConfig()
        self._lora = lora
        self._base_lr = optimizer.learning_rate
        self._schedule = scheduler
        self._max_skipped_steps = max_skipped_steps
        if lora is not None and keep_reference:
            raise ConfigError(
                "keep_reference keeps a second copy of the weights, but with lora the base is the reference"
            )
        if self._config.cpu_offload and self.device.type != "cuda":
            raise ConfigError(f"fsdp.cpu_offload does nothing on device {self.device}. Set it to false.")
        self.dp_rank = dist.get_rank() if dist.is_initialized() else 0
        self.dp_size = dist.get_world_size() if dist.is_initialized() else 1
        topology = topology if topology is not None else TrainTopology()
        topology.resolved(self.dp_size)

        self._modules: dict[str, nn.Module] = bundle.trainable_modules()
        self._lora_targets = self._prepare_parameters(lora)
        self._owns_process_group = self._wrap(topology)
        self._parameters = {
            f"{component}.{name}": parameter
            for component, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = make_adamw(list(self._parameters.values()), optimizer)
        self._policies = NamedPolicies(self._parameters, self._reshard)
        self._ema = None if ema is None else EMA(self._parameters, ema)
        self._reference = float_copies(self._parameters) if keep_reference else None
        self._auxiliary: dict[str, AuxiliaryModule] = {}
        self._num_optimizer_steps = 0
        self._policy_version = 0
        self._num_skipped_steps = 0
        self._num_skipped_in_a_row = 0
        self._is_offloaded = False

    # Building ---------------------------------------------------------------------------------------------------

    def _prepare_parameters(self, lora: LoraConfig | None) -> tuple[str, ...]:
        """Adapters, dtypes, device, and the same starting values on every rank; returns LoRA's targets."""
        targets: tuple[str, ...] = ()
        for module in self._modules.values():
            module.to(self.device)
        if lora is not None:
            targets = tuple(self._bundle.lora_target_modules if lora.target_modules is None else lora.target_modules)
            inject_lora(self._modules, lora, targets)
        trainable = [p for module in self._modules.values() for p in module.parameters() if p.requires_grad]
        if not trainable:
            raise ConfigError(f"no parameter of {', '.join(self._modules) or 'the bundle'} requires a gradient")
        keep_in(trainable, dtype_named(self._config.master_dtype, "fsdp.master_dtype"))
        check_frozen_dtype(self._modules.items(), self._config.param_dtype)
        if self.dp_size > 1:
            for parameter in trainable:
                dist.broadcast(parameter.data, src=0)
        return targets

    def _wrap(self, topology: TrainTopology) -> bool:
        """Checkpoint, compile and shard the blocks as configured; whether a process group was made for it."""
        config = self._config
        names = self._bundle.block_class_names
        blocks = {component: find_blocks(component, module, names) for component, module in self._modules.items()}
        for found in blocks.values():
            if config.activation_checkpointing:
                checkpoint_activations(found)
            if config.compile:
                compile_blocks(found)
        self._roots: list[FSDPModule] = []
        if self.dp_size == 1 and config.param_dtype == config.master_dtype == "fp32" and not config.cpu_offload:
            return False
        owns_process_group = ensure_process_group(self.device)
        mesh = data_parallel_mesh(topology, self.device)
        self._roots = [shard(module, blocks[name], mesh, config) for name, module in self._modules.items()]
        return owns_process_group

    def close(self) -> None:
        """Destroy the process group where the backend made one. Safe to call twice."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False

    # What trains ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by "component.name"; DTensors where sharded."""
        return self._parameters

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps taken, skipped ones not counted. A state that is loaded brings its own."""
        return self._num_optimizer_steps

    @property
    def policy_version(self) -> int:
        """Grows with every change of the weights: with an optimizer step, and also where an earlier state is loaded.

        So no two policies of a run share a version, and an engine that refuses old ones takes a rollback.
        """
        return self._policy_version

    @property
    def num_skipped_steps(self) -> int:
        """Steps skipped for a non-finite gradient norm."""
        return self._num_skipped_steps

    @property
    def lora_scale(self) -> float | None:
        """alpha / rank of the adapters, which no tensor records; None for full fine-tuning."""
        return None if self._lora is None else self._lora.alpha / self._lora.rank

    @property
    def computes_in_float32(self) -> bool:
        """Whether forwards of what trains are in float32 throughout, autocast aside."""
        is_float32 = all(
            parameter.dtype == torch.float32 for module in self._modules.values() for parameter in module.parameters()
        )
        return is_float32 and self._config.param_dtype == "fp32"

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP wraps the model."""
        return bool(self._roots)

    def add_module(
        self, name: str, module: nn.Module, optimizer: OptimizerConfig, *, max_grad_norm: float = math.inf
    ) -> None:
        """Train `module`, in place, beside the policy: replicated, gradients averaged over ranks, own AdamW and
        clipping, the learning rate under the backend's schedule, stepped and skipped with the policy.

        It is saved with the state, never exported. Every rank calls it, before a state is loaded.
        Raises ContractError for a name that is taken or not plain.
        """
        if name in self._auxiliary or "/" in name or not name:
            raise ContractError(f"module name {name!r} is taken or not a plain name")
        self._auxiliary[name] = AuxiliaryModule(
            module.to(self.device), optimizer, max_grad_norm=max_grad_norm, num_ranks=self.dp_size
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._optimizer.zero_grad(set_to_none=True)
        for auxiliary in self._auxiliary.values():
            auxiliary.zero_grad()

    @contextmanager
    def accumulating(self, is_last: bool) -> Generator[None]:
        """Around the backward of a micro-batch: gradients are summed over devices after the last one only."""
        for root in self._roots:
            root.set_requires_gradient_sync(is_last)
        try:
            yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Clip gradients to a global norm, then AdamW, schedule and EMA. Every rank calls it; collectives inside.

        A non-finite norm, of the policy or of a module beside it, drops the gradients and changes nothing else. Raises
        TrainingError at the max_skipped_steps-th such step in a row, and ContractError where there are no gradients.
        """
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm = {max_grad_norm} must be positive (inf for no clipping)")
        self._require_usable("optimizer_step")
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not gradients:
            raise ContractError("there are no gradients: call backward before optimizer_step")
        norm = float(global_grad_norm(gradients))
        norms = {name: auxiliary.reduced_grad_norm() for name, auxiliary in self._auxiliary.items()}
        lr = self._scheduled(self._base_lr)
        if bad := [value for value in (norm, *norms.values()) if not math.isfinite(value)]:
            self._skip(bad[0])
            return StepStats(norm, lr, is_skipped=True, module_grad_norms=norms)
        clip_gradients(gradients, norm, max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, auxiliary in self._auxiliary.items():
            auxiliary.step(norms[name], self._scheduled(auxiliary.learning_rate))
        self._reshard()
        self._num_optimizer_steps += 1
        self._policy_version += 1
        self._num_skipped_in_a_row = 0
        if self._ema is not None:
            self._ema.after_step(self._num_optimizer_steps)
        return StepStats(norm, lr, is_skipped=False, module_grad_norms=norms)

    def _scheduled(self, base_lr: float) -> float:
        return learning_rate_at(self._num_optimizer_steps, base_lr, self._schedule)

    def _skip(self, norm: float) -> None:
        self.zero_grad()
        self._num_skipped_steps += 1
        self._num_skipped_in_a_row += 1
        logger.warning(
            "gradient norm %s after %d optimizer steps: step skipped (%d in a row)",
            norm,
            self._num_optimizer_steps,
            self._num_skipped_in_a_row,
        )
        if self._num_skipped_in_a_row >= self._max_skipped_steps:
            raise TrainingError(
                f"{self._num_skipped_in_a_row} optimizer steps in a row had a non-finite gradient norm (last: {norm}), "
                f"after {self._num_optimizer_steps} good ones. Lower optimizer.learning_rate, or raise "
                "max_skipped_steps if single spikes are expected."
            )

    def _reshard(self) -> None:
        if self._roots:
            reshard(self._modules)

    def _require_usable(self, action: str) -> None:
        self._policies.require_current(action)
        if self._is_offloaded:
            raise ContractError(f"{action} while the backend is offloaded: call onload() first")

    # Named policies ---------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def keep_policy(self, name: str) -> None:
        """Keep a float32 copy of the current trainable parameters under `name`."""
        if name in (CURRENT_POLICY, EMA_POLICY, REFERENCE_POLICY) or "/" in name or not name:
            raise ContractError(f"policy name {name!r} is reserved or not a plain name")
        self._policies.keep(name)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def update_policy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        self._policies.update(name, decay)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the kept copies."""
        return self._policies.names

    @contextmanager
    def using_policy(self, name: str) -> Generator[None]:
        """Inside, the model computes with the copy's values ("ema" names the moving average).

        Values are swapped in place; requires_grad, adapters and optimizer state never change. One policy at a time.
        Backward through a graph that was recorded before, on the same parameters, is an error.
        """
        with self._policies.swapped_in(name, self.policy_values(name)):
            yield

    @contextmanager
    def reference_policy(self) -> Generator[None]:
        """Inside, the model computes as before training. Raises ConfigError for full fine-tuning without a copy."""
        with self._reference_context():
            yield

    def _reference_context(self) -> AbstractContextManager[None]:
        if self._lora is not None:
            return adapters_disabled(self._modules)
        if self._reference is None:
            raise ConfigError("a reference policy of full fine-tuning needs a copy: set backend.keep_reference: true")
        return self._policies.swapped_in(REFERENCE_POLICY, self._reference)

    @contextmanager
    def ema_policy(self) -> Generator[None]:
        """Inside, the model computes with the moving average. Raises ConfigError where there is none."""
        with self.using_policy(EMA_POLICY):
            yield

    def policy_values(self, name: str) -> Mapping[str, Tensor]:
        """Values of a policy by parameter name, sharded as the parameters are: "default" is the trained one."""
        self._policies.require_current(f"policy {name!r}")  # inside another, some of the values are elsewhere
        if name == CURRENT_POLICY:
            return {key: parameter.detach() for key, parameter in self._parameters.items()}
        if name == EMA_POLICY:
            if self._ema is None:
                raise ConfigError("there is no moving average: set backend.ema")
            return self._ema.copies
        return self._policies.values(name)

    # Collectives ------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the data-parallel ranks; the tensor itself on one device."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over the data-parallel ranks; the tensor itself on one device."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank; `value` itself where the model is not sharded. Implements
        unirl.types.protocols.ShardedPolicyStore. Every rank calls it; a collective inside where sharded."""
        if not self.is_sharded or self.dp_size == 1:
            return value
        return bool(self.all_reduce_max(torch.tensor(float(value), device=self.device)))

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.dp_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, op=operation)
        return total

    # Memory -----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def offload(self) -> None:
        """Move parameters, gradients, optimizer state and copies to host memory. Changes nothing on a CPU.

        With fsdp.cpu_offload they are there already.
        """
        self._policies.require_current("offload")
        self._is_offloaded = self.device.type != "cpu"
        self._move(torch.device("cpu"))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def onload(self) -> None:
        """Undo `offload`."""
        self._move(self.device)
        self._is_offloaded = False

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        for auxiliary in self._auxiliary.values():
            auxiliary.move(device)
        if self._config.cpu_offload:
            return
        for module in self._modules.values():
            module.to(device)
        move_optimizer(self._optimizer, device)
        self._policies.move(device)
        for copies in (self._reference, None if self._ema is None else self._ema.copies):
            if copies is not None:
                copies.update({name: tensor.to(device) for name, tensor in copies.items()})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # State ------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """The backend's own numbers, by the names of COUNTERS."""
        averages = 0 if self._ema is None else self._ema.num_averages
        steps = (self._num_optimizer_steps, self._num_skipped_steps, self._num_skipped_in_a_row)
        return dict(zip(COUNTERS, (*steps, averages, self._policy_version), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that training changes, by flat name: parameters, optimizer, policies, EMA, modules, counters.

        Tensors share memory with the backend, so that torch.distributed.checkpoint loads into place; DTensors where
        sharded, so that each rank saves its own part and any number of ranks can load it.
        """
        self._policies.require_current("state_dict")
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state[f"parameters/{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                state[f"optimizer/{name}/{key}"] = value
        for policy in self._policies.names:
            for name, tensor in self._policies.values(policy).items():
                state[f"policies/{policy}/{name}"] = tensor
        if self._ema is not None:
            for name, tensor in self._ema.copies.items():
                state[f"ema/{name}"] = tensor
        for module, auxiliary in self._auxiliary.items():
            state.update({f"auxiliary/{module}/{name}": tensor for name, tensor in auxiliary.state_dict().items()})
        state["counters"] = torch.tensor(list(self.counters.values()), dtype=torch.int64)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state: one that was loaded into place, or a copy. Raises CheckpointError where names differ."""
        own = self.state_dict()
        missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
        if missing or unexpected:
            raise CheckpointError(
                f"the state does not fit the backend: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unexpected)} unexpected {unexpected[:3]}. Resume with the options that it was saved with."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        counters = dict(zip(COUNTERS, (int(value) for value in state["counters"]), strict=True))
        self._num_optimizer_steps = counters["num_optimizer_steps"]
        self._num_skipped_steps = counters["num_skipped_steps"]
        self._num_skipped_in_a_row = counters["num_skipped_in_a_row"]
        saved = counters["policy_version"]
        self._policy_version = saved if saved >= self._policy_version else self._policy_version + 1
        if self._ema is not None:
            self._ema.num_averages = counters["num_ema_averages"]
        self.zero_grad()
        self._reshard()

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included."""
        self._reshard()
        beside = {f"auxiliary/{name}": auxiliary.module for name, auxiliary in self._auxiliary.items()}
        return {
            f"{component}.{name}": [list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
            for component, module in {**self._modules, **beside}.items()
            for name, parameter in module.named_parameters()
        }

    # Export -----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def export_lora(self, folder: str, policy: str = CURRENT_POLICY) -> None:
        """Write a policy's adapters where the model's usual pipeline loads them. Rank 0 writes; every rank calls it.

        Raises ConfigError without LoRA and ContractError for an unknown policy.
        """
        lora = self._lora
        if lora is None:
            raise ConfigError("export_lora needs backend.lora; full fine-tuning is exported by export_merged")
        values = {name: self._whole(tensor) for name, tensor in self.policy_values(policy).items()}
        state = {
            component: {
                plain_lora_name(name.removeprefix(f"{component}.")): tensor
                for name, tensor in values.items()
                if name.startswith(f"{component}.")
            }
            for component in self._modules
        }
        self._on_rank_zero(
            lambda: self._bundle.export_lora(
                folder, state, rank=lora.rank, alpha=lora.alpha, target_modules=self._lora_targets
            )
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def export_merged(self, folder: str, policy: str = CURRENT_POLICY) -> None:
        """Write the components with a policy's weights, LoRA merged, by save_pretrained. As `export_lora`."""
        self._policies.require_current("export_merged")
        values = self.policy_values(policy)
        self._reshard()
        state = {name: self._merged_state(name, module, values) for name, module in self._modules.items()}
        self._on_rank_zero(lambda: self._bundle.export_merged(folder, state))

    def _merged_state(self, component: str, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(self._merged_weights(component, module, module.state_dict(), values))

    def _merged_weights(
        self, component: str, module: nn.Module, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in host memory under the names that the model has without adapters, one after the other."""
        tensors = {name: values.get(f"{component}.{name}", tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            plain = plain_base_name(name)
            if plain is None:
                continue
            whole = self._whole(tensor)
            if self._lora is not None and is_adapted(name):
                a, b = (self._whole(tensors[factor]) for factor in lora_factor_names(name))
                whole = merged_weight(whole, a, b, rank=self._lora.rank, alpha=self._lora.alpha)
            yield plain, whole

    # Weights for an engine (unirl.types.protocols.WeightSource) ---------------------------------------------------

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of `weights`, by its name in the model's checkpoint, without moving one."""
        _, module = self._only_component()
        names = ((plain_base_name(name), tensor) for name, tensor in _without_ties(module).items())
        return {name: tuple(tensor.shape) for name, tensor in names if name is not None}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained policy tensor by tensor, adapters merged, whole and in host memory. Every rank goes through all.

        Raises ConfigError for a model of several trainable components, whose names would not say which.
        """
        component, module = self._only_component()
        values = self.policy_values(CURRENT_POLICY)
        self._reshard()
        yield from self._merged_weights(component, module, _without_ties(module), values)

    def adapter_weights(self) -> dict[str, Tensor]:
        """The trained policy's LoRA factors, whole and in host memory, as peft names them. Every rank calls it."""
        component, _ = self._only_component()
        self.adapter_config()
        return {
            plain_lora_name(name.removeprefix(f"{component}.")): self._whole(tensor)
            for name, tensor in self.policy_values(CURRENT_POLICY).items()
        }

    def adapter_config(self) -> AdapterConfig:
        """Rank, alpha and targets of the adapters. Raises ConfigError for full fine-tuning."""
        if self._lora is None:
            raise ConfigError("there is no adapter to push: set backend.lora, or push full weights")
        return AdapterConfig(self._lora.rank, self._lora.alpha, tuple(self._lora_targets))

    def _only_component(self) -> tuple[str, nn.Module]:
        if len(self._modules) != 1:
            raise ConfigError(f"weights of {sorted(self._modules)} cannot be pushed: an engine takes one component")
        return next(iter(self._modules.items()))

    @torch.no_grad()
    def _whole(self, tensor: Tensor) -> Tensor:
        """The unsharded tensor in host memory. Every rank calls it."""
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu")

    def _on_rank_zero(self, write: Callable[[], None]) -> None:
        """Rank 0 writes, the others wait for it and fail with it."""
        is_written = torch.zeros(1, device=self.device)
        try:
            if self.dp_rank == 0:
                write()
            is_written.fill_(1)
        finally:
            if self.dp_size > 1:
                dist.broadcast(is_written, src=0)
        if not bool(is_written):
            raise CheckpointError("rank 0 could not write the export; its own error says why")


def _without_ties(module: nn.Module) -> dict[str, Tensor]:
    """The module's state, a parameter with two names once, under its first."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}
