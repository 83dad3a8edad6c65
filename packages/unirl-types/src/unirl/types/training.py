"""What a training backend takes and gives: options of an optimizer, and what one step did.

Here, below both, because algorithms ask for modules to be trained and backends train them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from unirl.types.bounds import Bounds, NonNegative, bounded
from unirl.types.errors import ConfigError

Offloadable = Literal["weights", "optimizer"]
"""What a backend can move to host memory: parameters with their gradients and buffers; optimizer state, kept copies of
the policy, and modules that an algorithm trains with it."""
OFFLOADABLE: tuple[Offloadable, ...] = ("weights", "optimizer")

AdamWImplementation = Literal["auto", "fused", "foreach", "loop"]


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

    def __post_init__(self) -> None:
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
