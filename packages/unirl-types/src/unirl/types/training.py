"""What a training backend takes and gives: options of an optimizer, and what one step did.

Here, below both, because algorithms ask for modules to be trained and backends train them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from unirl.types.bounds import Bounds, NonNegative, bounded
from unirl.types.errors import ConfigError

Offloadable = Literal["weights", "optimizer"]
"""What a backend can move to host memory: parameters with their gradients and buffers; optimizer state, kept copies of
the policy, and modules that an algorithm trains with it."""
OFFLOADABLE: tuple[Offloadable, ...] = ("weights", "optimizer")

AdamWImplementation = Literal["auto", "fused", "foreach", "loop"]
OptimizerStates = Literal["full", "8bit", "bf16"]


@bounded("optimizer")
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: NonNegative
    betas: Annotated[tuple[float, float], Bounds(ge=0, lt=1)] = (0.9, 0.999)
    epsilon: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    """Decoupled; applies to every trainable parameter."""
    implementation: AdamWImplementation = "auto"
    """One kernel for all parameters ("fused"), one per operation ("foreach"), or one per parameter ("loop").
    "auto" takes the first of these that the parameters allow."""
    states: OptimizerStates = "full"
    """How both moments are kept: in the dtype of the parameters ("full"), as codes of 8 bits with a scale per block
    ("8bit"), or in bfloat16, rounded at random ("bf16"). With the latter two bfloat16 parameters are rounded at random
    too, so that small updates add up."""
    offload: bool = False
    """Moments rest in host memory, and visit the device while their parameters are stepped. Accelerators only."""

    def __post_init__(self) -> None:
        if self.states not in get_args(OptimizerStates):
            raise ConfigError(f"optimizer.states = {self.states!r} must be full, 8bit or bf16")
        if self.states != "full" and self.implementation != "auto":
            raise ConfigError(
                f"optimizer.implementation = {self.implementation!r} is a form of torch's AdamW, which keeps full "
                f"states. Set optimizer.implementation: auto, or states: full instead of {self.states}."
            )
        betas = tuple(self.betas)
        object.__setattr__(self, "betas", betas)
        if len(betas) != 2:
            raise ConfigError(f"optimizer.betas = {betas} must be two numbers in [0, 1)")


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping; not finite where the step was skipped."""
    lr: float
    """Learning rate of this step."""
    is_skipped: bool
    """A norm was not finite: parameters, optimizers, schedule and moving average are as before."""
    module_grad_norms: Mapping[str, float] = field(default_factory=dict)
    """The norm of each module of `ModuleStore.add_module`, before clipping."""
