"""Small modules that train together with the policy (a critic): replicated on every rank, each with its own AdamW.

They are no part of the policy: not of its parameters, its named copies, its moving average or what is exported.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unirl.train.backend.collectives import RankCollectives
from unirl.train.optim import clipped_step, global_grad_norm, make_adamw, move_optimizer
from unirl.types.errors import ConfigError
from unirl.types.training import OptimizerConfig


class AuxiliaryModule:
    """A module, its AdamW and its clipping. Ranks start from rank 0's values and step with the mean gradient over the
    shards of a batch.

    learning_rate: the optimizer's own; the backend applies its schedule to it.
    max_grad_norm: global L2 norm of the module's gradient; inf does not clip.
    """

    def __init__(
        self, module: nn.Module, config: OptimizerConfig, *, max_grad_norm: float, ranks: RankCollectives
    ) -> None:
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm = {max_grad_norm} of a module must be positive (inf for no clipping)")
        self.module = module
        self.learning_rate = config.learning_rate
        self._max_grad_norm = max_grad_norm
        self._ranks = ranks
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._optimizer = make_adamw(list(self._parameters.values()), config)
        if ranks.size("all") > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def reduced_grad_norm(self) -> float:
        """Average the gradients over the shards of a batch, in place, and return their global norm. A collective.

        A parameter without gradient counts as zero, so that ranks never wait for each other.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = self._gradients
        num_shards = self._ranks.size("dp")
        if num_shards > 1:
            total = self._ranks.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]), "dp")
            parts = (total / num_shards).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(global_grad_norm(gradients))

    def step(self, norm: float, lr: float) -> None:
        """Clip gradients of global norm `norm`, then AdamW at `lr`."""
        clipped_step(self._optimizer, self._gradients, norm, max_norm=self._max_grad_norm, lr=lr)

    def move(self, device: torch.device) -> None:
        """Move parameters, gradients and optimizer state."""
        self.module.to(device)
        move_optimizer(self._optimizer, device)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state by flat name, sharing memory."""
        state = {f"module/{name}": tensor for name, tensor in self.module.state_dict().items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"optimizer/{name}/{key}"] = value
        return state

    @property
    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
