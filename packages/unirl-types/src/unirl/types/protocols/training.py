"""What trains offers: named copies of its weights, steps of its optimizer, and its weights for engines and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unirl.types.roles import Axis, MeshPlace
from unirl.types.training import OFFLOADABLE, Offloadable, OptimizerConfig, StepStats
from unirl.types.weights import AdapterConfig, UpdateTally, WeightShard, WeightsPlace


class PolicyStore(Protocol):
    """Named copies of the trainable parameters, and ways to run the model with them for a while."""

    @property
    def policy_version(self) -> int:
        """Grows with every change of the trained weights."""
        ...

    def keep_policy(self, name: str) -> None:
        """Keep a copy of the current trainable parameters under `name`."""
        ...

    def update_policy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        ...

    def using_policy(self, name: str) -> AbstractContextManager[None]:
        """Inside, the model computes with the copy's values. Never touches requires_grad."""
        ...

    def reference_policy(self) -> AbstractContextManager[None]:
        """Inside, the model computes as before training (adapter disabled, or a frozen copy)."""
        ...


class ShardedPolicyStore(PolicyStore, Protocol):
    """A policy store whose model may be spread over ranks that must run it equally often."""

    def any_rank(self, value: bool) -> bool:
        """True if `value` is true on any rank that shares the model's shards; `value` itself where it is not sharded.

        A collective where it is: every rank calls it equally often.
        """
        ...


class ModuleStore(PolicyStore, Protocol):
    """A policy store that also trains modules of an algorithm's own."""

    def add_module(
        self, name: str, module: nn.Module, optimizer: OptimizerConfig, *, max_grad_norm: float = float("inf")
    ) -> None:
        """Train `module`, in place, together with the policy from now on. Every rank calls it, before a state is
        loaded."""
        ...


class CopyTrainer(PolicyStore, Protocol):
    """A policy store that also trains named copies, each on its own losses."""

    def train_copy(self, name: str, optimizer: OptimizerConfig, *, max_grad_norm: float = float("inf")) -> None:
        """Keep a copy of the current parameters under `name` that `copy_step` trains. Every rank calls it, before a
        state is loaded."""
        ...

    def copy_step(self, name: str, losses: Sequence[Callable[[], Tensor]], num_terms: int) -> StepStats:
        """One step of the copy on the mean over all terms on all devices; the trained weights stay as they are.

        losses: each is called while the model computes with the copy, and returns a sum over terms with gradients.
        """
        ...


class Collectives(Protocol):
    """What ranks that train together tell each other. Every rank calls every method, in the same order."""

    def all_reduce_sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Sum over the ranks of an axis; the tensor itself where there is one."""
        ...

    def all_reduce_max(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Maximum over the ranks of an axis; the tensor itself where there is one."""
        ...

    def any_rank(self, value: bool) -> bool:
        """True if `value` is true on any rank that shares the model's shards, see `ShardedPolicyStore.any_rank`."""
        ...

    def gathered(self, value: Any) -> list[Any]:  # Any: JSON
        """The values of all ranks, in their order, as JSON brings them."""
        ...


class TrainBackend(ShardedPolicyStore, ModuleStore, Protocol):
    """Owns what trains: parameters, optimizer, schedule, named policies, and how they are spread over devices.

    The stack computes losses and gradients; the checkpointer saves and restores. Every rank calls every method that is
    not a property, in the same order: collectives inside.
    """

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def mesh_place(self) -> MeshPlace:
        """Where this rank stands; calls are cut for it accordingly."""
        ...

    @property
    def dp_rank(self) -> int:
        """Which of `dp_size` shards of a batch this rank trains on, as `mesh_place` says."""
        ...

    @property
    def dp_size(self) -> int:
        """Number of shards that a batch is cut into. A rank differentiates the loss of its shard, and so do all ranks
        that work on it together; gradients are the mean over the shards."""
        ...

    @property
    def computes_in_float32(self) -> bool:
        """True if forwards of what trains are in float32 throughout, autocast aside."""
        ...

    @property
    def is_compiled(self) -> bool:
        """True if blocks of what trains are compiled."""
        ...

    @property
    def lora_scale(self) -> float | None:
        """alpha / rank of the adapters, which no tensor records; None for full fine-tuning."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by "component.name"; DTensors where sharded."""
        ...

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the kept copies."""
        ...

    @property
    def collectives(self) -> Collectives:
        """What the ranks tell each other."""
        ...

    @property
    def weight_source(self) -> WeightSource:
        """Weights of the policies for engines and exports."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch: gradients are summed over devices after the last one only."""
        ...

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Clip gradients to a global L2 norm, then step. A non-finite norm drops the gradients and changes nothing."""
        ...

    def offload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move these parts of what trains to host memory. Training needs both back."""
        ...

    def onload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Undo `offload`."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """Steps taken and skipped, averages, policy version."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All that training changes, by flat name. Tensors share memory with the backend; DTensors where sharded."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state: one that was loaded into place, or a copy. Raises CheckpointError if names differ."""
        ...

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included."""
        ...


class WeightSource(Protocol):
    """Weights of the policies, under the names of the model's checkpoint, whole and in host memory. Every rank calls
    every method, and in the same order: sharded weights are gathered tensor by tensor.

    policy: name of a kept copy, "ema", or None for the policy that trains. component: of a model that trains several;
    None takes all, whose names then are "component/name".
    """

    @property
    def policy_version(self) -> int:
        """Grows with every change of the trained weights."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """What trains, by the names of `ModelBundle.trainable_modules`."""
        ...

    def weight_shapes(self, component: str | None = None) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of `weights`, without moving one."""
        ...

    def weights(
        self, policy: str | None = None, component: str | None = None, *, where: WeightsPlace = "host"
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, adapters merged; tied ones once. Raises ContractError for an unknown policy.

        where: the tensors are, see WeightsPlace."""
        ...

    def shard_rows(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, int, int]]:
        """Whole shape, dtype, first row and end of what `shards` gives of each tensor, without moving one."""
        ...

    def shards(self, policy: str | None = None) -> Iterator[WeightShard]:
        """As `weights`, of each tensor the rows that this rank has, where they lie; nothing whole is gathered but
        adapters."""
        ...

    def adapter_weights(self, policy: str | None = None, component: str | None = None) -> dict[str, Tensor]:
        """The adapter's factors as peft names them. Raises ConfigError without an adapter."""
        ...

    def adapter_config(self) -> AdapterConfig:
        """Rank, alpha and targets of the adapter. Raises ConfigError without one."""
        ...

    def adapter_state(self, policy: str) -> Mapping[str, Mapping[str, Tensor]]:
        """Component -> LoRA factors of a policy ("default": the trained one) as peft names them."""
        ...

    def merged_state(
        self, policy: str, *, in_float32: bool = False, tally: UpdateTally | None = None
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Component -> all its weights under a policy, adapters merged; in their own dtype, or all in float32.

        tally: is told of every weight that an adapter was merged into.
        """
        ...
