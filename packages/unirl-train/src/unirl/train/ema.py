"""Exponential moving average of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unirl.train.configs import EMAConfig
from unirl.train.shards import local_part


def ema_decay(step: int, config: EMAConfig) -> float:
    """Decay of the average after optimizer step `step`, counted from 0.

    Source: the published code of Flow-GRPO (arXiv 2505.05470); with every = 1 this is the usual warm-up by averages.
    """
    if not config.warmup:
        return config.decay
    return min(config.decay, (1 + step) / (10 + step))


@torch.no_grad()
def float_copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Float32 copies, sharded as the parameters are."""
    return {
        name: parameter.detach().clone() if parameter.dtype == torch.float32 else parameter.detach().float()
        for name, parameter in parameters.items()
    }


@torch.no_grad()
def average_into(copies: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], decay: float) -> None:
    """copy <- decay * copy + (1 - decay) * parameter, in place and in float32.

    Written as an interpolation: a copy that equals its parameter stays exactly equal, and decay 0 copies exactly.
    """
    targets = [local_part(copies[name]) for name in parameters]
    current = [local_part(parameter).to(targets[i].dtype) for i, parameter in enumerate(parameters.values())]
    torch._foreach_lerp_(targets, current, 1.0 - decay)


class EMA:
    """Moving average of the trainable parameters.

    `copies`: float32, by parameter name. `num_averages`: how often they were averaged into.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig) -> None:
        self._parameters = parameters
        self._config = config
        self.copies = float_copies(parameters)
        self.num_averages = 0

    def after_step(self, num_optimizer_steps: int) -> None:
        """Average the current parameters in where this optimizer step, counted from 1, is due."""
        if num_optimizer_steps % self._config.every:
            return
        average_into(self.copies, self._parameters, ema_decay(num_optimizer_steps - 1, self._config))
        self.num_averages += 1
