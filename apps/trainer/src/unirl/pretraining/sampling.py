"""Sample a small flow-matching model as its stock pipeline does, without guidance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """Noise levels 1 = sigma_0 > ... > sigma_T = 0: a linear grid, shifted once; float32 [num_steps + 1]."""
    linear = torch.linspace(1, 0, num_steps + 1)
    return shift * linear / (1 + (shift - 1) * linear)


@torch.no_grad()
def euler_sample(
    transformer: Callable[..., tuple[Tensor, ...]], conditions: dict[str, Tensor], noise: Tensor, sigmas: Tensor
) -> Tensor:
    """Euler steps from `noise` [B, ...] along `sigmas` [T + 1] of a transformer that is fed 1000 sigma.

    conditions: its other inputs, by keyword.
    """
    latents = noise
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = transformer(
            hidden_states=latents, timestep=(1000 * sigma).expand(len(latents)), **conditions, return_dict=False
        )[0]
        latents = latents + (following - sigma) * velocity
    return latents
