"""Generalised advantage estimation. Pure functions.

Legend: B samples, S steps in the order of time: stochastic denoising steps, tokens or decisions, N steps of all samples
end to end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unirl.types.devices import widened
from unirl.types.errors import ConfigError, ContractError


def generalized_advantages(
    rewards: Tensor, values_BS: Tensor, *, gamma: float, lam: float, lengths_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every step, float64 [B, S] each.

        delta_s = r_s + gamma V_{s+1} - V_s        A_s = delta_s + gamma lam A_{s+1}        R_s = A_s + V_s

    rewards: [B], given after the last step of each sample, or [B, S] with one per step. values_BS: V before each step.
    gamma, lam: discount and trace decay a step, in [0, 1]. gamma = lam = 1 is r - V_s with R_s = r; lam = 0 is TD(0).
    lengths_B: steps of each sample; None takes all S. V is 0 after the last one, and what follows it comes back 0.
    Raises ContractError if shapes disagree and ConfigError outside the ranges.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
    """
    if values_BS.ndim != 2 or rewards.shape not in (values_BS.shape[:1], values_BS.shape):
        raise ContractError(
            f"rewards {tuple(rewards.shape)} must be [B] or [B, S] for values {tuple(values_BS.shape)} [B, S]"
        )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"algorithm.gamma = {gamma} and algorithm.lam = {lam} must lie in [0, 1]")
    num_samples, num_steps = values_BS.shape
    lengths = torch.full((num_samples,), num_steps) if lengths_B is None else lengths_B.cpu()
    if lengths.shape != (num_samples,) or bool((lengths > num_steps).any()):
        raise ContractError(f"lengths {lengths.tolist()} must be [B] of at most S for values {tuple(values_BS.shape)}")
    is_real = (torch.arange(num_steps) < lengths[:, None]).to(values_BS.device)
    values = torch.where(is_real, widened(values_BS.detach()), 0.0)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = gamma * following - values
    if rewards.ndim == 2:
        delta = delta + torch.where(is_real, widened(rewards.detach()), 0.0)
    else:
        rewarded = lengths.nonzero().flatten()
        delta[rewarded, lengths[rewarded] - 1] += widened(rewards.detach())[rewarded]
    advantages = torch.zeros_like(values)
    running = values.new_zeros(num_samples)
    for step in reversed(range(num_steps)):
        running = delta[:, step] + gamma * lam * running
        advantages[:, step] = running
    return advantages, advantages + values


def padded(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """[B, S] of values of samples end to end, zeros after the steps of each."""
    return pad_sequence(list(values_N.split(lengths_B.tolist())), batch_first=True)


def packed_advantages(
    rewards: Tensor, values_N: Tensor, lengths_B: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`generalized_advantages` of samples end to end: advantages and returns, float64 [N] each. rewards: as there."""
    advantages_BS, returns_BS = generalized_advantages(
        rewards, padded(values_N, lengths_B), gamma=gamma, lam=lam, lengths_B=lengths_B
    )
    is_real = torch.arange(advantages_BS.shape[1], device=values_N.device) < lengths_B.to(values_N.device)[:, None]
    return advantages_BS[is_real], returns_BS[is_real]
