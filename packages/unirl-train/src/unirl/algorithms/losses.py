"""Loss mathematics as pure functions of tensors: no model, no configuration, no backward.

Legend: R rows, one (sample, stochastic step) pair each; B samples; N latent elements of a sample.
Every function returns a value per row, not reduced; the stack owns reduction and scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.devices import widened
from unirl.types.errors import ContractError


def same_shape(**tensors: Tensor) -> None:
    """Raises ContractError, with their names, if tensors have different shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ContractError(f"shapes disagree: {shapes}")


MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8, whose square, and products with it, still fit into float32."""


def bounded_ratio(log_ratio_R: Tensor) -> Tensor:
    """exp(min(log_ratio, MAX_LOG_RATIO)), [R]: beyond the bound the ratio stands still and has no gradient.

    exp overflows float32 from 88.7 on, and its gradient turns even a factor of 0 into nan.
    """
    return log_ratio_R.clamp(max=MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logp_R: Tensor,
    anchor_R: Tensor,
    advantage_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float = math.inf,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, to be minimised: max(-A min(r, ratio_cap), -A clip(r, 1 - clip_low, 1 + clip_high)).

    logp_R, anchor_R: float32 [R], nats (per latent element where the kernel's reduction is the mean, which is why
    clips of 1e-4 are usual). The anchor carries no gradient. advantage_R: float32 [R].
    ratio_cap: above 1 + clip_high it bounds the loss where A < 0 (dual clip), and changes nothing where A > 0.
    Returns loss_R and detached values per row: ratio, clipped_high, clipped_low, approx_kl (half squared log-ratio).
    At r = 1 the gradient is -A. r is bounded, see `bounded_ratio`. Raises ContractError if shapes disagree.
    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Liu et al. 2025 (arXiv 2505.05470); the cap: Ye et al. 2020
    (arXiv 1912.09729), eq. 3.
    """
    same_shape(logp_R=logp_R, anchor_R=anchor_R, advantage_R=advantage_R)
    log_ratio = logp_R - anchor_R.detach()
    ratio = bounded_ratio(log_ratio)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = torch.maximum(-advantage_R * ratio.clamp(max=ratio_cap), -advantage_R * clipped)
    with torch.no_grad():
        rows = {
            "ratio": ratio.detach(),
            "clipped_high": (ratio > 1.0 + clip_high).float(),
            "clipped_low": (ratio < 1.0 - clip_low).float(),
            "approx_kl": 0.5 * log_ratio.detach().square(),
        }
    return loss_R, rows


def masked_surrogate(
    logp_R: Tensor, anchor_R: Tensor, advantage_R: Tensor, is_outside_R: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r, and 0 for rows outside the trust region whose update would lead further away (r > 1 with A > 0, or r < 1
    with A < 0). To be minimised.

    logp_R, anchor_R, advantage_R: float32 [R]; the anchor carries no gradient. is_outside_R: bool [R].
    Returns loss_R and detached booleans per row: dropped_positive and dropped_negative, by the sign of A. r is bounded,
    see `bounded_ratio`. Raises ContractError if shapes disagree.
    Source: Ping et al. 2026 (arXiv 2606.11025), its asymmetric mask.
    """
    same_shape(logp_R=logp_R, anchor_R=anchor_R, advantage_R=advantage_R, is_outside_R=is_outside_R)
    log_ratio = logp_R - anchor_R.detach()
    positive = is_outside_R & (log_ratio > 0) & (advantage_R > 0)
    negative = is_outside_R & (log_ratio < 0) & (advantage_R < 0)
    loss_R = torch.where(positive | negative, 0.0, -advantage_R * bounded_ratio(log_ratio))
    return loss_R, {"dropped_positive": positive.detach(), "dropped_negative": negative.detach()}


def prefix_budget(
    divergence_R: Tensor,
    sample_R: Tensor,
    step_R: Tensor,
    *,
    threshold: float,
    prefix_threshold: float,
    weight_floor: float,
) -> tuple[Tensor, Tensor]:
    """Which steps of a trajectory lie outside a trust region that is tighter early and where earlier steps used it up.

    A sample's steps, in order t = 1 .. T, have weights w_t falling linearly from 1 to weight_floor, and
        S_t = sum_{j <= t} w_j D_j,  W_t = sum_{j <= t} w_j
        inside:  w_t D_t <= threshold  and  S_t <= threshold + prefix_threshold W_{t - 1}
    divergence_R: D, float [R], at least 0. sample_R, step_R: int64 [R], any order; ALL rows of a sample must be there.
    Returns bool [R] twice: outside for either reason, and outside for the second.
    Source: Mao et al. 2026 (arXiv 2606.10968), eqs. 8 to 10.
    """
    same_shape(divergence_R=divergence_R, sample_R=sample_R, step_R=step_R)
    same_RR = sample_R[:, None] == sample_R[None, :]
    earlier_RR = same_RR & (step_R[None, :] < step_R[:, None])
    position_R, length_R = earlier_RR.sum(dim=1), same_RR.sum(dim=1)
    weight_R = 1 - (1 - weight_floor) * position_R / (length_R - 1).clamp(min=1)
    weighted_R = weight_R * widened(divergence_R)
    earlier = earlier_RR.to(weighted_R)
    over_prefix_R = earlier @ weighted_R + weighted_R > threshold + prefix_threshold * (earlier @ widened(weight_R))
    return (weighted_R > threshold) | over_prefix_R, over_prefix_R


@dataclass(frozen=True)
class NFTLoss:
    """Positive and negative branch of DiffusionNFT, a value per row."""

    loss_R: Tensor
    positive_R: Tensor
    negative_R: Tensor


def optimality(advantage_R: Tensor, *, advantage_max: float) -> Tensor:
    """Advantages mapped to the probability r in [0, 1] that a sample is good: clip(A / (2 A_max) + 1/2, 0, 1).

    Source: Zheng et al. 2025 (arXiv 2509.16117).
    """
    clipped = advantage_R.clamp(-advantage_max, advantage_max)
    return (clipped / (2 * advantage_max) + 0.5).clamp(0.0, 1.0)


def _weighted_error(x0_hat: Tensor, x0: Tensor, is_adaptive: bool, place_weight: Tensor | None = None) -> Tensor:
    dims = tuple(range(1, x0.ndim))
    error = (x0_hat - x0).square()
    if is_adaptive:
        with torch.no_grad():
            weight = (widened(x0_hat) - widened(x0)).abs().mean(dim=dims, keepdim=True).clamp(min=1e-5)
        error = error / weight.to(error.dtype)
    return (error if place_weight is None else error * place_weight).mean(dim=dims)


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
    place_weight: Tensor | None = None,
) -> NFTLoss:
    """Negative-aware fine-tuning on the forward process, to be minimised.

        v+ = (1 - beta) v_old + beta v_new        v- = (1 + beta) v_old - beta v_new
        x0+- = x_t - sigma v+-                    w+- = max(mean |x0+- - x0|, 1e-5), no gradient
        L = A_max / beta * [ r mean((x0+ - x0)^2 / w+) + (1 - r) mean((x0- - x0)^2 / w-) ]

    v_new carries gradients, v_old none; all [R, ...] float32. sigma_R, optimality_R: [R].
    place_weight: factors of the squared errors [R, ...], with mean 1 in a row; None: 1. w+- is without them.
    At v_new = v_old the gradient is A times the (weighted) flow-matching gradient for any beta.
    Source: Zheng et al. 2025 (arXiv 2509.16117), with the adaptive weight of its reference implementation.
    """
    same_shape(v_new=v_new, v_old=v_old, x_t=x_t, x0=x0)
    if place_weight is not None:
        same_shape(x0=x0, place_weight=place_weight)
    same_shape(sigma_R=sigma_R, optimality_R=optimality_R)
    v_old = v_old.detach()
    sigma = sigma_R.reshape(-1, *(1,) * (x_t.ndim - 1))
    positive = x_t - sigma * ((1 - beta) * v_old + beta * v_new)
    negative = x_t - sigma * ((1 + beta) * v_old - beta * v_new)
    positive_R = _weighted_error(positive, x0, adaptive_weight, place_weight)
    negative_R = _weighted_error(negative, x0, adaptive_weight, place_weight)
    loss_R = advantage_max / beta * (optimality_R * positive_R + (1 - optimality_R) * negative_R)
    return NFTLoss(loss_R, positive_R, negative_R)


def velocity_distance(v: Tensor, v_reference: Tensor) -> Tensor:
    """mean (v - v_ref)^2 a row [R]: the velocity-space penalty that stands for a KL in forward-process methods."""
    same_shape(v=v, v_reference=v_reference)
    return (v - v_reference.detach()).square().mean(dim=tuple(range(1, v.ndim)))


MATCHING_WEIGHTINGS = ("uniform", "t", "t2", "huber", "ghuber")
MATCHING_EPS = 1e-10
"""Added to the matching error under a root, whose derivative is infinite at 0."""


def matching_logp(
    v: Tensor, target: Tensor, sigma_R: Tensor, *, weighting: str = "ghuber", power: float = 0.25
) -> Tensor:
    """Minus the weighted flow-matching error, [R], used instead of a log-prob: with e = mean (v - target)^2, t = sigma,

        uniform  -e        t  -t e        t2  -t^2 e        huber  -t (sqrt(e + eps) - sqrt(eps))
        ghuber   -t / p ((e + eps)^p - eps^p)

    v, target: [R, ...] float32, v with gradients. power: p of ghuber, in (0, 1]; 1 gives t.
    Raises ContractError for an unknown weighting. Source: Xue et al. 2025 (arXiv 2509.25050) and its code.
    """
    error_R = velocity_distance(v, target)
    if weighting == "uniform":
        return -error_R
    if weighting == "t":
        return -sigma_R * error_R
    if weighting == "t2":
        return -sigma_R.square() * error_R
    if weighting not in MATCHING_WEIGHTINGS:
        raise ContractError(f"weighting = {weighting!r} must be one of {', '.join(MATCHING_WEIGHTINGS)}")
    exponent, factor = (0.5, 1.0) if weighting == "huber" else (power, 1.0 / power)
    return -sigma_R * factor * ((error_R + MATCHING_EPS) ** exponent - MATCHING_EPS**exponent)


def preference_loss(margin_P: Tensor, *, beta: float) -> Tensor:
    """Diffusion-DPO, to be minimised: -log sigmoid(-beta / 2 margin), [P] pairs.

    margin_P = d_winner - d_loser with d = mean (v - u)^2 - mean (v_ref - u)^2, u = noise - x0, at one noise and level
    for both of a pair: below 0 where the policy has come nearer to the winner than to the loser. At the reference the
    loss is ln 2 and its gradient beta / 4 (grad d_winner - grad d_loser).
    Source: Wallace et al. 2023 (arXiv 2311.12908), eq. 14.
    """
    return torch.nn.functional.softplus(0.5 * beta * margin_P)


def group_preference_loss(distance_UG: Tensor, advantage_UG: Tensor, *, beta: float) -> Tensor:
    """DGPO, to be minimised: 1 / beta softplus(beta mean_g A d), [U] units of G samples of one prompt.

    distance_UG: d = mean (v - u)^2 - mean (v_ref - u)^2, u = noise - x0, at one noise and level for all of a unit.
    The gradient of a sample is sigmoid(beta mean_g A d) A / G times that of its d: plain advantage-weighted matching,
    halved, at the reference, and fading once the group is ordered as its advantages are. With G = 2 and A = 1, -1 it is
    Diffusion-DPO divided by beta. Source: Luo et al. 2025 (arXiv 2510.08425).
    """
    same_shape(distance_UG=distance_UG, advantage_UG=advantage_UG)
    return torch.nn.functional.softplus(beta * (advantage_UG * distance_UG).mean(dim=1)) / beta


def implicit_reward(v: Tensor, v_old: Tensor, target: Tensor, *, adaptive_weight: bool) -> Tensor:
    """How much better than the old policy a row is explained, [R]: mean e_old^2 / w_old - mean e^2 / w.

    e = v - u and e_old = v_old - u with u = noise - x0; w = max(mean |e|, 1e-5) without gradient where adaptive_weight,
    else 1. v carries gradients; all [R, ...] float32. Source: Zhu et al. 2026 (arXiv 2603.14128) and its code.
    """
    same_shape(v=v, v_old=v_old, target=target)
    return _weighted_error(v_old.detach(), target, adaptive_weight) - _weighted_error(v, target, adaptive_weight)


def centred_reward_loss(implicit_UG: Tensor, reward_UG: Tensor, *, beta: float, advantage_max: float) -> Tensor:
    """CRD, to be minimised: (A_max / beta) mean_g (beta (r - mean_g r) - (R - mean_g R))^2, [U] units of G samples.

    implicit_UG: r, see `implicit_reward`. reward_UG: R. A_max / beta (`advantage_max / beta`) is a factor of the
    authors' code: it says what the loss weighs with a penalty, and how soon its gradient is clipped. What the optimum
    of a KL-regularised reward leaves unknown, a constant of the prompt, cancels in the centring. The gradient through
    mean_g r is 0, since the residuals of a unit sum to 0.
    Source: Zhu et al. 2026 (arXiv 2603.14128), with uniform weights.
    """
    same_shape(implicit_UG=implicit_UG, reward_UG=reward_UG)
    centred_UG = implicit_UG - implicit_UG.mean(dim=1, keepdim=True)
    residual_UG = beta * centred_UG - (reward_UG - reward_UG.mean(dim=1, keepdim=True))
    return advantage_max / beta * residual_UG.square().mean(dim=1)
