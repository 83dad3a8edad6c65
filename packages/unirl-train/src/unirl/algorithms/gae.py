"""Generalised advantage estimation. Pure functions.

Legend: B samples, S steps in the order of time: stochastic denoising steps, tokens or decisions, N steps of all samples
end to end, K turns of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unirl.types.devices import widened
from unirl.types.errors import ConfigError, ContractError


@dataclass(frozen=True)
class Turns:
    """How N tokens of B samples end to end are parted into K turns."""

    tokens_K: Tensor
    """[K] int64, at least 1 each, summing to N."""
    turns_B: Tensor
    """[B] int64, summing to K."""

    @property
    def ends_K(self) -> Tensor:
        """[K] place of the last token of each turn."""
        return self.tokens_K.cumsum(0) - 1

    @classmethod
    def of_runs(cls, chosen_N: Tensor, lengths_B: Tensor) -> Self:
        """The turns of the chosen ones among N tokens: those that follow each other without another between them.

        chosen_N: [N] bool. lengths_B: [B] int64, summing to N.
        """
        chosen = chosen_N.cpu()
        sample_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B.cpu())
        begins_N = chosen.clone()
        begins_N[1:] &= ~chosen[:-1] | (sample_N[1:] != sample_N[:-1])
        turn_M = begins_N.cumsum(0)[chosen] - 1
        turns_B = torch.bincount(sample_N[begins_N], minlength=len(lengths_B))
        return cls(torch.bincount(turn_M).to(chosen_N.device), turns_B.to(chosen_N.device))


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


def turn_advantages(
    rewards_K: Tensor,
    values_N: Tensor,
    turns: Turns,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every token, float64 [N] each, over turns and then within each:

        over turns, at the last token e_k of turn k:    delta_k = r_k + gamma_t V_{e_{k+1}} - V_{e_k}
                                                        A_{e_k} = delta_k + gamma_t lam_t A_{e_{k+1}}
        within a turn, at the tokens before its last:   A_i = (gamma V_{i+1} - V_i) + gamma lam A_{i+1}
        R_i = A_i + V_i

    rewards_K: of each turn. values_N: V before each token that the model wrote; what it read between turns has no part.
    gamma, lam: per token within a turn. turn_gamma, turn_lam: per turn, whatever its length. All of 1 give
    `generalized_advantages`, as one turn does.
    Raises what `generalized_advantages` raises.
    Source: bi-level GAE of VAGEN (arXiv 2510.16907), where one lambda serves both levels.
    """
    if not len(turns.tokens_K):
        return widened(values_N), widened(values_N)
    rewards_BK = padded(rewards_K, turns.turns_B)
    _, returns_K = packed_advantages(rewards_BK, values_N[turns.ends_K], turns.turns_B, gamma=turn_gamma, lam=turn_lam)
    # A last token that is given its return has the advantage of its turn: nothing follows it here.
    return packed_advantages(returns_K, values_N, turns.tokens_K, gamma=gamma, lam=lam)


def at_last(rewards_B: Tensor, lengths_B: Tensor) -> Tensor:
    """[N]: the reward of each sample at its last step, 0 elsewhere. A sample without steps has none."""
    rewards_N = rewards_B.new_zeros(int(lengths_B.sum()))
    rewarded = lengths_B.nonzero().flatten()
    rewards_N[lengths_B.cumsum(0)[rewarded] - 1] = rewards_B[rewarded]
    return rewards_N


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
