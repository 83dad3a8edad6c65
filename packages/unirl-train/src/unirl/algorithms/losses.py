"""Loss mathematics as pure functions of tensors: no model, no configuration, no backward.

Legend: R rows, one (sample, stochastic step) pair each; B samples; N latent elements of a sample.
Every function returns a value a row, not reduced; the stack owns reduction and scaling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.errors import ContractError


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ContractError(f"shapes disagree: {shapes}")


def clipped_surrogate(
    logp_R: Tensor, anchor_R: Tensor, advantage_R: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, to be minimised: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    logp_R, anchor_R: float32 [R], nats (per latent element where the kernel's reduction is the mean, which is why
    clips of 1e-4 are usual). The anchor carries no gradient. advantage_R: float32 [R].
    Returns loss_R and detached values a row: ratio, clipped_high, clipped_low, approx_kl (half squared log-ratio).
    At r = 1 the gradient is -A. Raises ContractError where shapes disagree.
    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Liu et al. 2025 (arXiv 2505.05470).
    """
    _same_shape(logp_R=logp_R, anchor_R=anchor_R, advantage_R=advantage_R)
    log_ratio = logp_R - anchor_R.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = torch.maximum(-advantage_R * ratio, -advantage_R * clipped)
    with torch.no_grad():
        rows = {
            "ratio": ratio.detach(),
            "clipped_high": (ratio > 1.0 + clip_high).float(),
            "clipped_low": (ratio < 1.0 - clip_low).float(),
            "approx_kl": 0.5 * log_ratio.detach().square(),
        }
    return loss_R, rows


@dataclass(frozen=True)
class NFTLoss:
    """Positive and negative branch of DiffusionNFT, a value a row."""

    loss_R: Tensor
    positive_R: Tensor
    negative_R: Tensor


def optimality(advantage_R: Tensor, *, advantage_max: float) -> Tensor:
    """Advantages mapped to the probability r in [0, 1] that a sample is good: clip(A / (2 A_max) + 1/2, 0, 1).

    Source: Zheng et al. 2025 (arXiv 2509.16117).
    """
    clipped = advantage_R.clamp(-advantage_max, advantage_max)
    return (clipped / (2 * advantage_max) + 0.5).clamp(0.0, 1.0)


def _weighted_error(x0_hat: Tensor, x0: Tensor, is_adaptive: bool) -> Tensor:
    dims = tuple(range(1, x0.ndim))
    error = (x0_hat - x0).square()
    if not is_adaptive:
        return error.mean(dim=dims)
    with torch.no_grad():
        weight = (x0_hat.double() - x0.double()).abs().mean(dim=dims, keepdim=True).clamp(min=1e-5)
    return (error / weight.to(error.dtype)).mean(dim=dims)


def nft_loss(
    v_new: Tensor,
    v_old: Tensor,
    x_t: Tensor,
    x0: Tensor,
    sigma_R: Tensor,
    optimality_R: Tensor,
    *,
    beta: float,
    advantage_max: float,
    adaptive_weight: bool = True,
) -> NFTLoss:
    """Negative-aware fine-tuning on the forward process, to be minimised.

        v+ = (1 - beta) v_old + beta v_new        v- = (1 + beta) v_old - beta v_new
        x0+- = x_t - sigma v+-                    w+- = max(mean |x0+- - x0|, 1e-5), no gradient
        L = A_max / beta * [ r mean((x0+ - x0)^2 / w+) + (1 - r) mean((x0- - x0)^2 / w-) ]

    v_new carries gradients, v_old none; all [R, ...] float32. sigma_R, optimality_R: [R].
    At v_new = v_old the gradient is A times the (weighted) flow-matching gradient for any beta.
    Source: Zheng et al. 2025 (arXiv 2509.16117), with the adaptive weight of its reference implementation.
    """
    _same_shape(v_new=v_new, v_old=v_old, x_t=x_t, x0=x0)
    _same_shape(sigma_R=sigma_R, optimality_R=optimality_R)
    v_old = v_old.detach()
    sigma = sigma_R.reshape(-1, *(1,) * (x_t.ndim - 1))
    positive = x_t - sigma * ((1 - beta) * v_old + beta * v_new)
    negative = x_t - sigma * ((1 + beta) * v_old - beta * v_new)
    positive_R = _weighted_error(positive, x0, adaptive_weight)
    negative_R = _weighted_error(negative, x0, adaptive_weight)
    loss_R = advantage_max / beta * (optimality_R * positive_R + (1 - optimality_R) * negative_R)
    return NFTLoss(loss_R, positive_R, negative_R)


def velocity_distance(v: Tensor, v_reference: Tensor) -> Tensor:
    """mean (v - v_ref)^2 a row [R]: the velocity-space penalty that stands for a KL in forward-process methods."""
    _same_shape(v=v, v_reference=v_reference)
    return (v - v_reference.detach()).square().mean(dim=tuple(range(1, v.ndim)))
