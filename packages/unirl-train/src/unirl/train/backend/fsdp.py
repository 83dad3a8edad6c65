"""The training backend: trainable parameters, optimizer, named policies, on one device or sharded by FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unirl.train.backend.auxiliary import AuxiliaryModule
from unirl.train.backend.build import Sharding, compute_in, is_sharding, prepare_parameters, wrap
from unirl.train.backend.collectives import RankCollectives
from unirl.train.backend.expert_exchange import RowExchange
from unirl.train.backend.fill import fill, on_every_rank
from unirl.train.backend.layer_exchange import SumExchange
from unirl.train.backend.policies import REFERENCE_POLICY, NamedPolicies
from unirl.train.backend.ring import token_exchange
from unirl.train.backend.rules import unproven_with_layers
from unirl.train.backend.state import TrainState, architecture
from unirl.train.backend.trained_copies import TrainedCopy
from unirl.train.backend.weight_source import PolicyWeights
from unirl.train.backend.wrap import reshard, shard_all
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, LrSchedulerConfig, TrainTopology
from unirl.train.hosted_states import check_offload
from unirl.train.lora import adapters_disabled, is_empty
from unirl.train.optim import clipped_step, global_grad_norm, learning_rate_at, make_adamw, move_optimizer
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import empty_cache, is_accelerator
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DefersWeights, ModelBundle, RoutesRows, StacksWeights
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.training import OFFLOADABLE, Offloadable, OptimizerConfig, StepStats


@bounded("backend")
class FSDPBackend:
    """Owns what trains: full fine-tuning, or LoRA with `lora`. Implements unirl.types.protocols.training.TrainBackend.

    On one device nothing is wrapped: the model runs as it is, in `fsdp.param_dtype`. Otherwise every block and then the
    root of each trainable component is sharded by FSDP2 over the mesh of `topology` (one dimension, or HSDP with
    dp_replicate > 1), tokens are spread over its axis sp, layers over tp and experts over ep; on one device, for
    cpu_offload alone, over a process group of this process, which the backend makes and `close` destroys. Trainable
    parameters are kept in `fsdp.master_dtype`; ranks start from rank 0's.

    Weights that the bundle defers (unirl.types.protocols.models.DefersWeights) are read once shards are made: each rank
    reads its own, and none holds more than them and one tensor.

    bundle: its trainable_modules() are changed in place. device: where they train. max_skipped_steps: steps in a row
    with a non-finite gradient norm after which TrainingError is raised. keep_reference: with full fine-tuning, keep a
    copy of the starting weights for `reference_policy` (LoRA needs none: its base is the reference).
    The state holds what changes: a frozen base and buffers are not part of it.
    Raises ConfigError for options that do not fit the model or the number of devices.
    """

    recipe_rules: ClassVar[str] = "unirl.train.backend.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    reads_weights: ClassVar[bool] = True
    """True if it reads what a bundle defers, each rank its shards."""

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
        self._config = fsdp if fsdp is not None else FSDPConfig()
        self._lora = lora
        self._base_lr = optimizer.learning_rate
        self._schedule = scheduler
        self._max_skipped_steps = max_skipped_steps
        if lora is not None and keep_reference:
            raise ConfigError(
                "keep_reference keeps a second copy of the weights, but with lora the base is the reference"
            )
        for name in ("cpu_offload", "activation_offload"):
            if getattr(self._config, name) and not is_accelerator(self.device):
                raise ConfigError(f"fsdp.{name} does nothing on device {self.device}. Set it to false.")
        check_offload(optimizer, self.device, keeps_host=self._config.cpu_offload)
        topology = topology if topology is not None else TrainTopology()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.mesh_place = topology.place(rank, world_size)
        """Where this rank stands."""
        if self.mesh_place.tp_size > 1:
            given = {"fsdp": vars(self._config), "optimizer": vars(optimizer), "lora": vars(lora) if lora else {}}
            for problem in unproven_with_layers(self.mesh_place.tp_size, given):
                raise ConfigError(problem)

        self._modules = bundle.trainable_modules()
        # Before adapters and dtypes of training change names and dtypes. A second backend of a bundle finds values.
        is_deferred = isinstance(bundle, DefersWeights) and any(map(is_empty, self._modules.values()))
        stored = on_every_rank(bundle.stored_weights) if is_deferred else {}
        parts = bundle.published_parts() if isinstance(bundle, StacksWeights) else {}
        adapter = prepare_parameters(bundle, self._modules, self._config, lora, self.device)
        self.collectives = RankCollectives(self.mesh_place, self.device, is_sharded=is_sharding(self._config))
        """What the ranks tell each other."""
        self.token_exchange = token_exchange(self.collectives, self.mesh_place, self.device)
        """How tokens are spread over ranks; None where no two ranks work on the same samples."""
        self.expert_exchange = RowExchange(self.collectives.group("ep")) if self.mesh_place.ep_size > 1 else None
        """How tokens reach their experts; None where each rank has all."""
        self.layer_exchange = SumExchange(self.collectives.group("tp")) if self.mesh_place.tp_size > 1 else None
        """How ranks add up what their parts of a layer make; None where each has whole layers."""
        self._roots, self._owns_process_group = wrap(
            bundle,
            self._modules,
            self._config,
            self._sharding(topology),
            self.device,
            self.token_exchange,
            self.expert_exchange,
            self.layer_exchange,
        )
        if is_deferred:
            shards_on = torch.device("cpu") if self._config.cpu_offload else self.device
            fill(self._modules, stored, lora, shards_on=shards_on, buffers_on=self.device)
        if self._roots and isinstance(bundle, RoutesRows):
            bundle.follow_ranks(self.collectives.any_rank)
        self._masters = compute_in({} if self._roots else self._modules, self._config)
        self._parameters = {
            f"{component}.{name}": self._masters.of.get(f"{component}.{name}", parameter)
            for component, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = make_adamw(list(self._parameters.values()), optimizer)
        self.policies = NamedPolicies(self._parameters, self._follow_values, ema=ema, keep_reference=keep_reference)
        """Named copies of the parameters, and their values."""
        self._auxiliary: dict[str, AuxiliaryModule] = {}
        self._trained_copies: dict[str, TrainedCopy] = {}
        self._state = TrainState(
            self._parameters, self._optimizer, self.policies, self._auxiliary, self._trained_copies
        )
        self.progress = self._state.progress
        """How far training is; a state that is loaded brings its own."""
        self.weight_source = PolicyWeights(
            self._modules,
            self.policies,
            self.progress,
            adapter,
            self._reshard,
            parts,
            kept=self._masters.of,
            is_quantised=lora is not None and lora.base is not None,
        )
        """Weights of the policies for engines and exports."""
        self._offloaded: set[Offloadable] = set()

    def _sharding(self, topology: TrainTopology) -> Sharding:
        """How FSDP2 is applied: called by the constructor, for another library's to replace it."""
        return partial(shard_all, topology=topology, config=self._config, device=self.device)

    def close(self) -> None:
        """Destroy the process group where the backend made one. Safe to call twice."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False

    # What trains ------------------------------------------------------------------------------------------------

    @property
    def dp_rank(self) -> int:
        """Which of `dp_size` shards of a batch this rank trains on."""
        return self.mesh_place.dp_rank

    @property
    def dp_size(self) -> int:
        """Number of shards that a batch is cut into."""
        return self.mesh_place.dp_size

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by "component.name"; DTensors where sharded."""
        return self._parameters

    @property
    def policy_version(self) -> int:
        """Grows with every change of the weights: with an optimizer step, and also where an earlier state is loaded.

        So no two policies of a run share a version, and an engine that refuses old ones takes a rollback.
        """
        return self.progress.policy_version

    @property
    def lora_scale(self) -> float | None:
        """alpha / rank of the adapters, which no tensor records; None for full fine-tuning."""
        return None if self._lora is None else self._lora.alpha / self._lora.rank

    @property
    def computes_in_float32(self) -> bool:
        """True if forwards of what trains are in float32 throughout, autocast aside."""
        is_float32 = all(
            parameter.dtype == torch.float32 for module in self._modules.values() for parameter in module.parameters()
        )
        return is_float32 and self._config.param_dtype == "fp32"

    @property
    def is_compiled(self) -> bool:
        """True if blocks of what trains are compiled."""
        return self._config.compile

    @property
    def is_sharded(self) -> bool:
        """True if FSDP wraps the model."""
        return bool(self._roots)

    def add_module(
        self, name: str, module: nn.Module, optimizer: OptimizerConfig, *, max_grad_norm: float = math.inf
    ) -> None:
        """Train `module`, in place, together with the policy: replicated, gradients averaged over the shards of a
        batch, own AdamW and clipping, the learning rate under the backend's schedule, stepped and skipped with the
        policy.

        It is saved with the state, never exported. Every rank calls it, before a state is loaded.
        Raises ContractError for a name that is taken or not plain.
        """
        if name in self._auxiliary or "/" in name or not name:
            raise ContractError(f"module name {name!r} is taken or not a plain name")
        check_offload(optimizer, self.device, keeps_host=False)
        self._auxiliary[name] = AuxiliaryModule(
            module.to(self.device), optimizer, max_grad_norm=max_grad_norm, ranks=self.collectives
        )

    def train_copy(self, name: str, optimizer: OptimizerConfig, *, max_grad_norm: float = math.inf) -> None:
        """Keep a copy of the current parameters under `name` that `copy_step` trains, with its own AdamW and clipping.

        It is saved with the state, its optimizer too. Every rank calls it, before a state is loaded.
        Raises ContractError for a name that is kept already.
        """
        if name in self.policies.names:
            raise ContractError(f"there is a copy {name!r} already")
        check_offload(optimizer, self.device, keeps_host=self._config.cpu_offload)
        self.policies.keep(name)
        self._trained_copies[name] = TrainedCopy(
            self.policies.values(name),
            optimizer,
            max_grad_norm=max_grad_norm,
            max_skipped_steps=self._max_skipped_steps,
        )

    def copy_step(self, name: str, losses: Sequence[Callable[[], Tensor]], num_terms: int) -> StepStats:
        """One step of a copy of `train_copy`, on the mean over all terms on all devices. The policy stays as it is.

        losses: each is called while the model computes with the copy and returns a SUM over terms, and its backward
        follows; equally many on every rank. num_terms: of them all on this rank. Gradients that were there are dropped.
        The learning rate is under the backend's schedule. Every rank calls it; collectives inside.
        """
        self._require_usable(f"copy_step({name!r})")
        self.zero_grad()
        counted = torch.tensor(float(num_terms), device=self.device)
        total = float(self.collectives.all_reduce_sum(counted, "dp"))
        with self.policies.using(name):
            for place, loss in enumerate(losses):
                with self.accumulating(place == len(losses) - 1):
                    (loss() * (self.dp_size / total)).backward()
        gradients = {key: each.grad for key, each in self._parameters.items() if each.grad is not None}
        copy = self._trained_copies[name]
        stats = copy.step(gradients, self._scheduled(copy.learning_rate))
        self.zero_grad()
        return stats

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

        A non-finite norm, of the policy or of a module with it, drops the gradients and changes nothing else. Raises
        TrainingError at the max_skipped_steps-th such step in a row, and ContractError if there are no gradients.
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
            self.zero_grad()
            self.progress.skip(bad[0], self._max_skipped_steps)
            return StepStats(norm, lr, is_skipped=True, module_grad_norms=norms)
        clipped_step(self._optimizer, gradients, norm, max_norm=max_grad_norm, lr=lr)
        for name, auxiliary in self._auxiliary.items():
            auxiliary.step(norms[name], self._scheduled(auxiliary.learning_rate))
        self._follow_values()
        self.progress.step()
        self.policies.after_step(self.progress.num_optimizer_steps)
        return StepStats(norm, lr, is_skipped=False, module_grad_norms=norms)

    def _scheduled(self, base_lr: float) -> float:
        return learning_rate_at(self.progress.num_optimizer_steps, base_lr, self._schedule)

    def _follow_values(self) -> None:
        """Parameters have changed: what computes takes their values."""
        self._masters.follow()
        self._reshard()

    def _reshard(self) -> None:
        if self._roots:
            reshard(self._modules)

    def _require_usable(self, action: str) -> None:
        self.policies.require_current(action)
        if self._offloaded:
            parts = " and ".join(sorted(self._offloaded))
            raise ContractError(f"{action} while {parts} of the backend are offloaded: call onload() first")

    # Named policies ---------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def keep_policy(self, name: str) -> None:
        """Keep a float32 copy of the current trainable parameters under `name`."""
        self.policies.keep(name)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def update_policy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        self.policies.update(name, decay)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the kept copies."""
        return self.policies.names

    @contextmanager
    def using_policy(self, name: str) -> Generator[None]:
        """Inside, the model computes with the copy's values ("ema" names the moving average, "reference" the model as
        before training).

        Values are swapped in place; requires_grad, adapters and optimizer state never change. One policy at a time.
        Backward through a graph that was recorded before, on the same parameters, is an error.
        """
        with self.reference_policy() if name == REFERENCE_POLICY else self.policies.using(name):
            yield

    @contextmanager
    def reference_policy(self) -> Generator[None]:
        """Inside, the model computes as before training. Raises ConfigError for full fine-tuning without a copy."""
        with self.policies.reference() if self._lora is None else adapters_disabled(self._modules):
            yield

    def any_rank(self, value: bool) -> bool:
        """See unirl.types.protocols.training.ShardedPolicyStore, as which engines know the backend."""
        return self.collectives.any_rank(value)

    # Memory -----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def offload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move parameters with their gradients, or optimizer state, copies and modules with the policy, to host
        memory. Changes nothing on a CPU.

        With fsdp.cpu_offload parameters, optimizer state and copies are there already.
        """
        self.policies.require_current("offload")
        if self.device.type != "cpu":
            self._offloaded |= set(parts)
        self._move(parts, torch.device("cpu"))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def onload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Undo `offload`."""
        self._move(parts, self.device)
        self._offloaded -= set(parts)

    @torch.no_grad()
    def _move(self, parts: Sequence[Offloadable], device: torch.device) -> None:
        if "optimizer" in parts:
            for auxiliary in self._auxiliary.values():
                auxiliary.move(device)
        if self._config.cpu_offload:
            return
        if "weights" in parts:
            for module in self._modules.values():
                module.to(device)
            self._masters.move(device)
        if "optimizer" in parts:
            move_optimizer(self._optimizer, device)
            self.policies.move(device)
            for name, copy in self._trained_copies.items():
                copy.move(self.policies.values(name), device)
        empty_cache(self.device)

    # State ------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """Steps taken and skipped, averages and policy version, by the names of unirl.train.backend.state.COUNTERS."""
        return self._state.counters

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that training changes, by flat name, sharing memory (see `TrainState.tensors`)."""
        return self._state.tensors()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state: one that was loaded into place, or a copy. Raises CheckpointError if names differ."""
        self._state.load(state)
        self.zero_grad()
        self._follow_values()

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included."""
        self._reshard()
        beside = {f"auxiliary/{name}": auxiliary.module for name, auxiliary in self._auxiliary.items()}
        return architecture({**self._modules, **beside}, self._masters.of)
