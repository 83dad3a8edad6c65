"""Loss mathematics of policy gradients on tokens, as pure functions: no model, no configuration, no backward.

Legend: B sequences; M tokens of all of them end to end, only those that train (a loss mask is applied by leaving tokens
out, so it counts in numerators and denominators alike); lengths_B int64 tokens of each sequence, summing to M.
Losses are a value per token, not reduced: the loss of an update is sum(weight_M loss_M) / num_terms with the weights of
`aggregation_weights`, both summed over all micro-batches and devices.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from unirl.algorithms.losses import MAX_LOG_RATIO, bounded_ratio, same_shape
from unirl.types.devices import wide_float, widened
from unirl.types.errors import ConfigError, ContractError

ImportanceLevel = Literal["token", "sequence", "sequence-token"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Divergence = Literal["tv", "kl"]


def require_choice(name: str, value: str, choices: object) -> None:
    """Raises ConfigError if `value` is none of the values of the Literal `choices`."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} = {value!r} must be one of {', '.join(get_args(choices))}")


def sequence_index(lengths_B: Tensor) -> Tensor:
    """int64 [M]: which sequence each token belongs to."""
    return torch.arange(lengths_B.numel(), device=lengths_B.device).repeat_interleave(lengths_B)


def sequence_sum(values_M: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum over the tokens of each sequence, [B], with gradients; 0 for a sequence without tokens."""
    if int(lengths_B.sum()) != values_M.numel():
        raise ContractError(f"lengths sum to {int(lengths_B.sum())}, there are {values_M.numel()} tokens")
    return values_M.new_zeros(lengths_B.numel()).index_add(0, sequence_index(lengths_B), values_M)


def sequence_mean(values_M: Tensor, lengths_B: Tensor) -> Tensor:
    """Mean over the tokens of each sequence, [B], with gradients; 0 for a sequence without tokens."""
    return sequence_sum(values_M, lengths_B) / lengths_B.clamp(min=1)


def importance_log_ratio(logp_M: Tensor, anchor_M: Tensor, lengths_B: Tensor, *, level: ImportanceLevel) -> Tensor:
    """log of the importance ratio of every token, [M], with gradients to logp_M.

        token            log p - log p_old
        sequence         its mean over the tokens of the sequence (GSPO: the ratio of likelihoods, length-normalised)
        sequence-token   the value of `sequence` with the gradient of `token` (GSPO-token)

    Source: Zheng et al. 2025 (arXiv 2507.18071), eqs. 5 to 7 and 14.
    """
    same_shape(logp_M=logp_M, anchor_M=anchor_M)
    log_ratio_M = logp_M - anchor_M.detach()
    if level == "token":
        return log_ratio_M
    require_choice("importance_level", level, ImportanceLevel)
    mean_M = sequence_mean(log_ratio_M, lengths_B)[sequence_index(lengths_B)]
    return mean_M if level == "sequence" else mean_M.detach() + (logp_M - logp_M.detach())


def aggregation_weights(lengths_B: Tensor, *, mode: LossAggregation, horizon: int) -> tuple[Tensor, int]:
    """Weights float64 [M] of the tokens and the number of terms that the weighted sum is divided by.

        token-mean                1 a token,            divided by M        (DAPO)
        seq-mean-token-mean       1 / length a token,   divided by B        (GRPO; without tokens it adds 0)
        seq-mean-token-sum-norm   1 / horizon a token,  divided by B        (Dr. GRPO; horizon is a constant length)

    Sources: Yu et al. 2025 (arXiv 2503.14476), eq. 8; Shao et al. 2024 (arXiv 2402.03300), eq. 3; Liu et al. 2025
    (arXiv 2503.20783), section 3.
    """
    num_sequences, num_tokens = lengths_B.numel(), int(lengths_B.sum())
    device = lengths_B.device
    if mode == "token-mean":
        return torch.ones(num_tokens, dtype=wide_float(device), device=device), num_tokens
    if mode == "seq-mean-token-sum-norm":
        return torch.full((num_tokens,), 1 / horizon, dtype=wide_float(device), device=device), num_sequences
    require_choice("loss_agg_mode", mode, LossAggregation)
    return (1 / widened(lengths_B.clamp(min=1))).repeat_interleave(lengths_B), num_sequences


def optimal_token_advantages(value_B: Tensor, energy_M: Tensor, lengths_B: Tensor, *, samples_per_group: int) -> Tensor:
    """G_i - sum_i G_i W_it / sum_i W_it of every token, float64 [M]: the baseline of least variance at its position.

    value_B: G, the reward of each sequence, or any advantage that differs from it by a constant of the group.
    energy_M: squared length of the score of each token's logits, 1 - 2 p + sum over words of p^2, float32.
    W_it: its sum over the tokens up to t, the t-th trained token of the sequence; 0 after the last. The sums are over
    the `samples_per_group` consecutive sequences of a prompt. A token where all others have ended has advantage 0.
    Raises ContractError if sequences are not whole groups. Source: arXiv 2602.07078; verl's `optimal_token_baseline`.
    """
    if lengths_B.numel() % samples_per_group or value_B.numel() != lengths_B.numel():
        raise ContractError(
            f"{lengths_B.numel()} sequences with {value_B.numel()} values are not groups of {samples_per_group}"
        )
    # Packed throughout: no length is read back from the device.
    num_tokens = energy_M.numel()
    index_M = torch.arange(lengths_B.numel(), device=lengths_B.device).repeat_interleave(
        lengths_B, output_size=num_tokens
    )
    starts_B = lengths_B.cumsum(0) - lengths_B
    sums = widened(energy_M.detach()).cumsum(0)
    total_M = sums - torch.cat([sums.new_zeros(1), sums])[starts_B[index_M]]
    position_M = torch.arange(num_tokens, device=lengths_B.device) - starts_B[index_M]
    place_M = index_M.div(samples_per_group, rounding_mode="floor") * num_tokens + position_M
    value_M = widened(value_B.detach()).to(sums.device)[index_M]
    size = lengths_B.numel() // samples_per_group * num_tokens
    weight = sums.new_zeros(size).index_add(0, place_M, total_M)
    weighted = sums.new_zeros(size).index_add(0, place_M, value_M * total_M)
    # Where no token could have been another one, every score is 0, and so is what an advantage does.
    return value_M - (weighted / weight.clamp(min=torch.finfo(sums.dtype).tiny))[place_M]


def truncated_ratio_loss(
    log_ratio_M: Tensor, logp_M: Tensor, advantage_M: Tensor, *, ratio_min: float, ratio_max: float
) -> Tensor:
    """-sg(clamp(r, ratio_min, ratio_max)) A log p, [M], to be minimised: no token's gradient is ever cut off.

    A ratio_max of infinity leaves the bound of `bounded_ratio`.
    Source: MiniMax 2025 (arXiv 2506.13585), eqs. 4 and 5 (CISPO), which leaves ratio_min at 0.
    """
    same_shape(log_ratio_M=log_ratio_M, logp_M=logp_M, advantage_M=advantage_M)
    return -bounded_ratio(log_ratio_M.detach()).clamp(ratio_min, ratio_max) * advantage_M * logp_M


def soft_gate_loss(
    log_ratio_M: Tensor, advantage_M: Tensor, *, temperature_positive: float, temperature_negative: float
) -> tuple[Tensor, Tensor]:
    """-4 / tau sigmoid(tau (r - 1)) A, [M], to be minimised: a gate that closes smoothly where a clip cuts.

    tau is temperature_positive for A > 0, else temperature_negative. Returns the loss and the detached gate [M]
    4 p (1 - p) with p = sigmoid(tau (r - 1)): of the gradient of -A r, what is left; 1 at r = 1, falling on both sides.
    Source: Gao et al. 2025 (arXiv 2511.20347), SAPO.
    """
    same_shape(log_ratio_M=log_ratio_M, advantage_M=advantage_M)
    positive, negative = (log_ratio_M.new_tensor(tau) for tau in (temperature_positive, temperature_negative))
    tau_M = torch.where(advantage_M > 0, positive, negative)
    p_M = torch.sigmoid(tau_M * (bounded_ratio(log_ratio_M) - 1))
    return -4 / tau_M * p_M * advantage_M, (4 * p_M * (1 - p_M)).detach()


def geometric_mean_loss(
    log_ratio_M: Tensor, advantage_M: Tensor, lengths_B: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the sequence of c), the same for all of its tokens, [M], to be minimised.

        c = min(log r, clip_high) for A > 0,  max(log r, -clip_low) otherwise

    Returns the loss and which tokens are clipped above and below, [M].
    Source: Zhao et al. 2025 (arXiv 2507.20673), GMPO.
    """
    same_shape(log_ratio_M=log_ratio_M, advantage_M=advantage_M)
    is_good_M = advantage_M > 0
    clipped_M = torch.where(is_good_M, log_ratio_M.clamp(max=clip_high), log_ratio_M.clamp(min=-clip_low))
    mean_M = sequence_mean(clipped_M, lengths_B)[sequence_index(lengths_B)]
    high_M, low_M = is_good_M & (log_ratio_M > clip_high), ~is_good_M & (log_ratio_M < -clip_low)
    return -bounded_ratio(mean_M) * advantage_M, {"clipped_high": high_M.float(), "clipped_low": low_M.float()}


MIN_SEQUENCE_RATIO = 1e-8
"""Least ratio of a sequence in `gamma_weighted_loss`, the paper's."""


def gamma_weighted_loss(
    log_ratio_M: Tensor,
    logp_M: Tensor,
    advantage_M: Tensor,
    lengths_B: Tensor,
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """-sg(phi(w)) A log p, [M], to be minimised, with w the ratio of the whole sequence, the product of its tokens'.

        phi(w) = w^k exp(lambda (1 - w)),  1 at w = 1, highest at w = k / lambda

    positive, negative: (k, lambda) for A >= 0 and A < 0. Returns the loss and the detached weights [M].
    Source: arXiv 2602.10693, VESPO.
    """
    same_shape(log_ratio_M=log_ratio_M, logp_M=logp_M, advantage_M=advantage_M)
    total_B = sequence_sum(log_ratio_M.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), lengths_B)
    log_w_M = total_B.clamp(math.log(MIN_SEQUENCE_RATIO), MAX_LOG_RATIO)[sequence_index(lengths_B)]
    is_good_M = advantage_M >= 0
    power_M, decay_M = (
        torch.where(is_good_M, log_w_M.new_tensor(good), log_w_M.new_tensor(bad))
        for good, bad in zip(positive, negative, strict=True)
    )
    weight_M = (decay_M + power_M * log_w_M - decay_M * log_w_M.exp()).exp()
    return -weight_M * advantage_M * logp_M, weight_M


def quadratic_penalty_loss(
    log_ratio_M: Tensor, logp_M: Tensor, advantage_M: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """-A log p + beta / 2 (log r)^2, [M], to be minimised, and the detached penalty [M].

    Source: Richemond et al. 2024 (arXiv 2405.19107), DRO, as Kimi k1.5 (arXiv 2501.12599) takes it.
    """
    same_shape(log_ratio_M=log_ratio_M, logp_M=logp_M, advantage_M=advantage_M)
    penalty_M = beta / 2 * log_ratio_M.square()
    return penalty_M - advantage_M * logp_M, penalty_M.detach()


def binary_divergence(logp_M: Tensor, anchor_M: Tensor, *, kind: Divergence) -> Tensor:
    """Divergence [M] between two policies that only tell the sampled token from all others, without gradient.

    tv: |p - p_old|. kl: p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). Both are lower bounds of the
    divergence over the whole vocabulary. Source: Qi et al. 2026 (arXiv 2602.04879), DPPO.
    """
    same_shape(logp_M=logp_M, anchor_M=anchor_M)
    with torch.no_grad():
        if kind == "tv":
            return (logp_M.exp() - anchor_M.exp()).abs()
        require_choice("divergence", kind, Divergence)
        logp, old = widened(logp_M), widened(anchor_M)
        # The rest of the mass is 1 - p; the floor keeps a probability that rounds to 1 from making inf - inf.
        rest, old_rest = (torch.log(-torch.expm1(value.clamp(max=-1e-12))) for value in (logp, old))
        return (old.exp() * (old - logp) + old_rest.exp() * (old_rest - rest)).to(logp_M.dtype)


def regularised_loss(
    log_ratio_M: Tensor, anchor_M: Tensor, advantage_M: Tensor, *, epsilon: float, is_weighted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r + |A| w (r - 1)^2 / (2 epsilon), [M], to be minimised, with w = p_old (is_weighted) or 1.

    The penalty replaces clipping: a token's gradient weight is 1 - sign(A (r - 1)) w |r - 1| / epsilon, and
    w |r - 1| = |p - p_old| with w = p_old. Log-ratios are clamped to +- MAX_LOG_RATIO.
    Returns the loss and the detached penalty [M]. At r = 1 the gradient is -A; with epsilon -> inf the loss is -A r.
    Source: Yao et al. 2026 (arXiv 2606.09821), DRPO; is_weighted = False is SPO.
    """
    same_shape(log_ratio_M=log_ratio_M, anchor_M=anchor_M, advantage_M=advantage_M)
    ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_M = anchor_M.detach().exp() if is_weighted else torch.ones_like(anchor_M)
    penalty_M = advantage_M.abs() * weight_M * (ratio_M - 1).square() / (2 * epsilon)
    return -advantage_M * ratio_M + penalty_M, {"ratio": ratio_M.detach(), "penalty": penalty_M.detach()}
