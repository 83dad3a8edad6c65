"""Options of the training backend. Values are checked when they are made; what depends on the model, by the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from unirl.train.backend.rules import topology_problem
from unirl.types.bounds import Bounds, NonNegativeInt, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.precision import dtype_named
from unirl.types.roles import MeshPlace
from unirl.types.training import OptimizerConfig as OptimizerConfig

ScheduleType = Literal["constant", "linear", "cosine"]
LoraInit = Literal["gaussian", "default"]
Recomputation = bool | Literal["full", "selective"]


@bounded("scheduler")
@dataclass(frozen=True)
class LrSchedulerConfig:
    """Learning rate by optimizer step: a linear ramp over `warmup_steps`, then the schedule."""

    type: ScheduleType = "constant"
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None
    """Optimizer step at which "linear" and "cosine" reach zero, warm-up included. Not for "constant"."""

    def __post_init__(self) -> None:
        if self.type == "constant":
            if self.total_steps is not None:
                raise ConfigError(
                    f"scheduler.total_steps = {self.total_steps} means nothing for type 'constant'. "
                    "Remove it, or choose 'linear' or 'cosine'."
                )
        elif self.total_steps is None:
            raise ConfigError(f"scheduler.type = {self.type!r} needs scheduler.total_steps")
        elif self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"scheduler.total_steps = {self.total_steps} must be more than warmup_steps = {self.warmup_steps}"
            )


@dataclass(frozen=True)
class FSDPConfig:
    """How parameters are kept, computed with, sharded and recomputed."""

    param_dtype: str = "fp32"
    """Weights and activations of forward and backward: "fp32", "bf16", or "fp16". fp16 gradients are not scaled, so
    small ones underflow; prefer bf16 for training."""
    reduce_dtype: str = "fp32"
    """Gradients while they are summed over devices."""
    master_dtype: str = "fp32"
    """Trainable parameters and optimizer state. In bf16, updates below 1/256 of a weight are lost."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights between its forward and its backward. The root keeps its own."""
    activation_checkpointing: Recomputation = False
    """Recompute each block in the backward instead of keeping its activations: all of it (true, or "full"), or all but
    its matrix products and attention, whose results are kept ("selective")."""
    activation_offload: bool = False
    """Keep in host memory what each block needs for its backward, and bring it back before that. Not on a CPU."""
    compile: bool = False
    """torch.compile, block by block."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory. CUDA only."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "master_dtype"):
            dtype_named(getattr(self, name), f"fsdp.{name}")
        if self.activation_checkpointing not in (True, False, "full", "selective"):
            raise ConfigError(
                f"fsdp.activation_checkpointing = {self.activation_checkpointing!r} must be false, true, full or "
                "selective"
            )
        if self.activation_offload and self.compile:
            raise ConfigError(
                "fsdp.activation_offload moves nothing of compiled blocks. Set it or fsdp.compile to false."
            )
        if self.master_dtype == "fp16":
            raise ConfigError("fsdp.master_dtype = 'fp16' overflows in AdamW. Choose fp32 or bf16.")
        if self.param_dtype == "fp32" and self.master_dtype != "fp32":
            raise ConfigError(
                f"fsdp.master_dtype = {self.master_dtype!r} is less precise than param_dtype = 'fp32'. "
                "Set master_dtype: fp32, or param_dtype: bf16."
            )


@bounded("lora")
@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on linear layers: W + (alpha / rank) B A."""

    rank: PositiveInt
    alpha: Positive
    target_modules: Sequence[str] | None = None
    """Module name suffixes; None takes the bundle's."""
    dropout: float = 0.0
    """Must be 0: another mask for the anchor than for the update would make the ratio differ from one."""
    init: LoraInit = "gaussian"
    """Initial A: normal with standard deviation 1 / rank, or peft's default (Kaiming uniform). B starts at zero."""
    base: Literal["nf4"] | None = None
    """How frozen weights of linear layers in blocks are kept: "nf4" in 4 bits, whole on every device (QLoRA); None as
    the bundle loads them. Engines with a copy of the model, and merged weights, are refused with it."""

    def __post_init__(self) -> None:
        if self.dropout != 0.0:
            raise ConfigError(
                f"lora.dropout = {self.dropout}: the anchor and the update would see different masks, so the ratio of "
                "the first update would not be one. Set lora.dropout: 0."
            )
        if self.target_modules is not None and (isinstance(self.target_modules, str) or not self.target_modules):
            raise ConfigError(f"lora.target_modules = {self.target_modules!r} must be a list of name suffixes, or null")


@bounded("ema")
@dataclass(frozen=True)
class EMAConfig:
    """Exponential moving average of the trainable parameters, kept in float32."""

    decay: Annotated[float, Bounds(ge=0, lt=1)] = 0.9999
    warmup: bool = True
    """Use min(decay, (1 + k) / (10 + k)) after optimizer step k, counted from 0, so that early weights are forgotten.
    k counts steps, not averages: with `every` above 1 the limit is reached after as many steps as with 1."""
    every: PositiveInt = 1
    """Optimizer steps between averages."""


class Axes(NamedTuple):
    """Sizes of the axes of a group of ranks. Of neighbouring ranks those of one group of sp, or of tp, stand together.

    The first four multiply to the number of ranks; `ep` divides the ranks of a copy of the model once more, and `ring`
    those of sp.
    """

    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int = 1
    ep: int = 1
    ring: int = 1

    @property
    def dp(self) -> int:
        """Number of shards that a batch is cut into."""
        return self.dp_replicate * self.dp_shard


@bounded("topology")
@dataclass(frozen=True)
class TrainTopology:
    """How the devices divide: `dp_replicate` copies of the model, each sharded over `dp_shard` * `sp` * `tp` devices;
    the tokens of one shard of a batch are spread over `sp` devices, or its layers over `tp` devices, and every `ep`
    devices of a copy have its experts together."""

    dp_replicate: PositiveInt = 1
    dp_shard: int = -1
    """-1: as many as there are devices for each copy."""
    sp: PositiveInt = 1
    """Ranks that work on the same samples, each on its part of their tokens (sequence parallelism)."""
    ring: PositiveInt = 1
    """Groups into which the `sp` ranks divide. Ranks of a group exchange tokens for heads around each attention
    (Ulysses), and keys and values go around the groups (ring attention). 1: heads alone; sp: keys and values alone."""
    tp: PositiveInt = 1
    """Ranks that compute the same samples, each with its part of the weights of attention and MLP."""
    ep: PositiveInt = 1
    """Neighbouring ranks of a copy of the model that have its experts together, each a part of them, which is sharded
    over the ranks of the copy that have the same part. Tokens go to the ranks of their experts."""

    def resolved(self, world_size: int) -> Axes:
        """The sizes on `world_size` devices. Raises ConfigError if they do not multiply to it."""
        problem = topology_problem(self.dp_replicate, self.dp_shard, self.sp, self.tp, self.ep, self.ring, world_size)
        if problem is not None:
            raise ConfigError(f"topology.{problem}")
        shard = world_size // (self.dp_replicate * self.sp * self.tp) if self.dp_shard == -1 else self.dp_shard
        return Axes(self.dp_replicate, shard, self.sp, self.tp, self.ep, self.ring)

    def place(self, rank: int, world_size: int) -> MeshPlace:
        """Where a rank stands. Raises ConfigError as `resolved` does."""
        axes = self.resolved(world_size)
        dp_rank, sharing = divmod(rank, axes.sp * axes.tp)
        return MeshPlace(
            dp_rank=dp_rank,
            dp_size=axes.dp,
            sp_rank=sharing % axes.sp,
            sp_size=axes.sp,
            tp_rank=sharing % axes.tp,
            tp_size=axes.tp,
            ep_rank=rank % axes.ep,
            ep_size=axes.ep,
            ring_size=axes.ring,
        )
