"""Generalised advantage estimation of an episode that is rewarded once, at its end. A pure function.

Legend: B samples, S stochastic steps in the order of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError


def generalized_advantages(rewards_B: Tensor, values_BS: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every step, float64 [B, S] each.

        delta_s = r_s + gamma V_{s+1} - V_s        A_s = delta_s + gamma lam A_{s+1}        R_s = A_s + V_s

    rewards_B: the only reward, given after the last stochastic step. values_BS: V before each step; 0 after the last.
    gamma, lam: discount and trace decay a step, in [0, 1]. gamma = lam = 1 is r - V_s with R_s = r; lam = 0 is TD(0).
    Raises ContractError where shapes disagree and ConfigError outside the ranges.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
    """
    if values_BS.ndim != 2 or rewards_B.shape != values_BS.shape[:1]:
        raise ContractError(f"rewards {tuple(rewards_B.shape)} must be [B] for values {tuple(values_BS.shape)} [B, S]")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"algorithm.gamma = {gamma} and algorithm.lam = {lam} must lie in [0, 1]")
    values = values_BS.detach().double()
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = gamma * following - values
    delta[:, -1] += rewards_B.detach().double()
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        running = delta[:, step] + gamma * lam * running
        advantages[:, step] = running
    return advantages, advantages + values
