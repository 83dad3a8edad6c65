"""Named copies of the policy that train too, each on its own losses and with its own AdamW: a fake score, for one.

The copy is a policy as any: the model computes with it where its values are swapped in, so it costs one more set of
what trains (adapters, or all weights) and no second model. Its gradients are those of the model, sharded and averaged
as the policy's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unirl.train.optim import clipped_step, global_grad_norm, make_adamw, move_optimizer
from unirl.types.errors import ConfigError, TrainingError
from unirl.types.training import OptimizerConfig, StepStats


class TrainedCopy:
    """The values of one copy, its AdamW and its clipping.

    values: by parameter name, sharded as the parameters are; stepped in place. learning_rate: the optimizer's own; the
    backend applies its schedule to it. max_grad_norm: global L2 norm of the copy's gradient; inf does not clip.
    max_skipped_steps: steps in a row with a non-finite norm after which TrainingError is raised.
    """

    def __init__(
        self, values: Mapping[str, Tensor], config: OptimizerConfig, *, max_grad_norm: float, max_skipped_steps: int
    ) -> None:
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm = {max_grad_norm} of a copy must be positive (inf for no clipping)")
        self.learning_rate = config.learning_rate
        self._max_grad_norm = max_grad_norm
        self._max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0
        # They share the memory that the copy has outside of a swap, during which its tensors may hold other values.
        self._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
        self._optimizer = make_adamw(list(self._parameters.values()), config)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> StepStats:
        """Clip, then AdamW at `lr`. Called while no values are swapped; collectives inside where sharded.

        A non-finite norm changes nothing. Raises TrainingError at the max_skipped_steps-th such step in a row.
        """
        norm = float(global_grad_norm(list(gradients.values())))
        if not math.isfinite(norm):
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= self._max_skipped_steps:
                raise TrainingError(
                    f"{self._skipped_in_a_row} steps in a row of a copy that trains had a non-finite gradient norm "
                    f"(last: {norm}). Lower its learning rate, or raise max_skipped_steps if "
                    "single spikes are expected."
                )
            return StepStats(norm, lr, is_skipped=True)
        self._skipped_in_a_row = 0
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        own = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        clipped_step(self._optimizer, own, norm, max_norm=self._max_grad_norm, lr=lr)
        self._optimizer.zero_grad(set_to_none=True)
        return StepStats(norm, lr, is_skipped=False)

    def move(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        """Follow the copy, whose values were moved, and move the optimizer's state."""
        for name, parameter in self._parameters.items():
            parameter.data = values[name]
        move_optimizer(self._optimizer, device)

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's state by flat name, sharing memory; the values are saved with the other copies."""
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state[parameter].items()
        }
