"""The training backend: trainable parameters, optimizer, named policies, on one device or sharded by FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unirl.train.backend.build import Sharding
from unirl.train.backend.joint_optimizer import JointOptimizer
from unirl.train.backend.policies import REFERENCE_POLICY, NamedPolicies
from unirl.train.backend.rules import unproven_with_layers
from unirl.train.backend.trained_model import TrainedModel
from unirl.train.backend.wrap import shard_all
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, LrSchedulerConfig, TrainTopology
from unirl.train.hosted_states import check_offload
from unirl.train.lora import adapters_disabled
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import empty_cache, is_accelerator
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import ModelBundle
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
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
        topology = topology if topology is not None else TrainTopology()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.mesh_place = topology.place(rank, world_size)
        """Where this rank stands."""
        _check_options(self._config, optimizer, lora, self.mesh_place, self.device, keep_reference=keep_reference)
        self._model = TrainedModel(bundle, self._config, lora, self.mesh_place, self._sharding(topology), self.device)
        self.collectives = self._model.collectives
        """What the ranks tell each other."""
        self.token_exchange = self._model.token_exchange
        """How tokens are spread over ranks; None where no two ranks work on the same samples."""
        self.expert_exchange = self._model.expert_exchange
        """How tokens reach their experts; None where each rank has all."""
        self.layer_exchange = self._model.layer_exchange
        """How ranks add up what their parts of a layer make; None where each has whole layers."""
        self.policies = NamedPolicies(
            self._model.parameters, self._model.follow_values, ema=ema, keep_reference=keep_reference
        )
        """Named copies of the parameters, and their values."""
        self._optimizer = JointOptimizer(
            self._model.parameters, self.policies, optimizer, scheduler, max_skipped_steps=max_skipped_steps
        )
        self._state = self._optimizer.state
        self.progress = self._optimizer.progress
        """How far training is; a state that is loaded brings its own."""
        self.weight_source = self._model.weight_source(self.policies, self.progress)
        """Weights of the policies for engines and exports."""
        self._offloaded: set[Offloadable] = set()

    def _sharding(self, topology: TrainTopology) -> Sharding:
        """How FSDP2 is applied: called by the constructor, for another library's to replace it."""
        return partial(shard_all, topology=topology, config=self._config, device=self.device)

    def close(self) -> None:
        """Destroy the process group where the backend made one. Safe to call twice."""
        self._model.close()

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
        return self._model.parameters

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
        return self._model.computes_in_float32

    @property
    def is_compiled(self) -> bool:
        """True if blocks of what trains are compiled."""
        return self._config.compile

    @property
    def is_sharded(self) -> bool:
        """True if FSDP wraps the model."""
        return self._model.is_sharded

    def add_module(
        self, name: str, module: nn.Module, optimizer: OptimizerConfig, *, max_grad_norm: float = math.inf
    ) -> None:
        """Train `module`, in place, together with the policy: replicated, gradients averaged over the shards of a
        batch, own AdamW and clipping, the learning rate under the backend's schedule, stepped and skipped with the
        policy.

        It is saved with the state, never exported. Every rank calls it, before a state is loaded.
        Raises ContractError for a name that is taken or not plain.
        """
        check_offload(optimizer, self.device, keeps_host=False)
        self._optimizer.add_module(
            name, module.to(self.device), optimizer, max_grad_norm=max_grad_norm, ranks=self.collectives
        )

    def train_copy(self, name: str, optimizer: OptimizerConfig, *, max_grad_norm: float = math.inf) -> None:
        """Keep a copy of the current parameters under `name` that `copy_step` trains, with its own AdamW and clipping.

        It is saved with the state, its optimizer too. Every rank calls it, before a state is loaded.
        Raises ContractError for a name that is kept already.
        """
        check_offload(optimizer, self.device, keeps_host=self._config.cpu_offload)
        self._optimizer.train_copy(name, optimizer, max_grad_norm=max_grad_norm)

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
        return self._optimizer.step_copy(name)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._optimizer.zero_grad()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch: gradients are summed over devices after the last one only."""
        return self._model.accumulating(is_last)

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Clip gradients to a global norm, then AdamW, schedule and EMA. Every rank calls it; collectives inside.

        A non-finite norm, of the policy or of a module with it, drops the gradients and changes nothing else. Raises
        TrainingError at the max_skipped_steps-th such step in a row, and ContractError if there are no gradients.
        """
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm = {max_grad_norm} must be positive (inf for no clipping)")
        self._require_usable("optimizer_step")
        stats = self._optimizer.step(max_grad_norm)
        if not stats.is_skipped:
            self._model.follow_values()
            self.policies.after_step(self.progress.num_optimizer_steps)
        return stats

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
        with self.policies.reference() if self._lora is None else adapters_disabled(self._model.modules):
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
            self._optimizer.move_modules(device)
        if self._config.cpu_offload:
            return
        if "weights" in parts:
            self._model.move(device)
        if "optimizer" in parts:
            self.policies.move(device)
            self._optimizer.move_state(device)
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
        self._model.follow_values()

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included."""
        modules = {f"auxiliary/{name}": each.module for name, each in self._optimizer.auxiliary.items()}
        return self._model.architecture(modules)


def _check_options(
    config: FSDPConfig,
    optimizer: OptimizerConfig,
    lora: LoraConfig | None,
    place: MeshPlace,
    device: torch.device,
    *,
    keep_reference: bool,
) -> None:
    """Raises ConfigError for options that do nothing here, or that do not go together."""
    if lora is not None and keep_reference:
        raise ConfigError("keep_reference keeps a second copy of the weights, but with lora the base is the reference")
    for name in ("cpu_offload", "activation_offload"):
        if getattr(config, name) and not is_accelerator(device):
            raise ConfigError(f"fsdp.{name} does nothing on device {device}. Set it to false.")
    check_offload(optimizer, device, keeps_host=config.cpu_offload)
    if place.tp_size > 1:
        given = {"fsdp": vars(config), "optimizer": vars(optimizer), "lora": vars(lora) if lora else {}}
        for problem in unproven_with_layers(place.tp_size, given):
            raise ConfigError(problem)
