"""Gaussian log-probability and the KL between two transitions of equal standard deviation.

All functions compute in float32 and return one number per row, [R]. `reduction` is named everywhere because it changes
the mathematics of what follows: "sum" is the log-probability in nats; "mean" divides it by N, the number of latent
elements, so that a ratio of two of them is a geometric mean per element. Published clip ranges (1e-4, 1e-5) are
calibrated to "mean" and to the N of their resolution. Shape letters: see `unirl.sde`.
"""

import math
from typing import Literal, get_args

from torch import Tensor

from unirl.sde.rows import check_rows, check_same_shape, over_rows

Reduction = Literal["mean", "sum"]


def check_reduction(reduction: Reduction) -> None:
    """Raises ValueError unless `reduction` is one of the names this module knows."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction = {reduction!r} is not one of {get_args(Reduction)}.")


def reduce_elements(value: Tensor, reduction: Reduction) -> Tensor:
    """Mean or sum of `value` [R, ...] over everything but the rows, [R]."""
    check_reduction(reduction)
    flat = value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
    return flat.mean(dim=1) if reduction == "mean" else flat.sum(dim=1)


def gaussian_log_prob(y: Tensor, mean: Tensor, std_R: Tensor, reduction: Reduction) -> Tensor:
    """log N(y; mean, std^2) of every row, [R] float32, summed ("sum") or averaged ("mean") over its N elements.

    y, mean: [R, ...], any float dtype. std_R: [R], positive. The action y is detached: the gradient goes to `mean`
    only.
    Raises ValueError if shapes disagree. Source: Flow-GRPO (arXiv 2505.05470), the transition density of its SDE.
    """
    check_rows(mean, std_R=std_R)
    check_same_shape(mean, y=y)
    std_R = std_R.float()
    squared_R = reduce_elements((y.detach().float() - mean.float()).square(), reduction)
    num_elements = math.prod(mean.shape[1:]) if reduction == "sum" else 1
    return -squared_R / (2 * std_R.square()) - num_elements * (std_R.log() + 0.5 * math.log(2 * math.pi))


def gaussian_log_density(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(y; mean, std^2) of every element, [R, ...] float32: the terms that `gaussian_log_prob` sums.

    For a sum over some elements alone, or for elements with different deviations. y, mean: as there; y is detached.
    std: positive, [R] or of mean's shape; gradients flow to it.
    Raises ValueError if shapes disagree.
    """
    check_same_shape(mean, y=y)
    if std.shape != mean.shape:
        check_rows(mean, std_R=std)
        std = over_rows(std, mean)
    std = std.float()
    squared = (y.detach().float() - mean.float()).square()
    return -squared / (2 * std.square()) - (std.log() + 0.5 * math.log(2 * math.pi))


def transition_kl(mean_p: Tensor, mean_q: Tensor, std_R: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Exact KL(p || q) of two Gaussians with the same standard deviation: (mean_p - mean_q)^2 / (2 std^2), [R].

    std_R is the transition's standard deviation, sqrt(-dt) included (`Transition.std_R`). Symmetric in p and q;
    gradients flow to both means. A row with std 0 (the last CPS step) has no finite KL: leave it out.
    """
    check_rows(mean_p, std_R=std_R)
    check_same_shape(mean_p, mean_q=mean_q)
    return reduce_elements((mean_p.float() - mean_q.float()).square(), reduction) / (2 * std_R.float().square())


def code_kl(mean_p: Tensor, mean_q: Tensor, q_R: Tensor, reduction: Reduction = "mean") -> Tensor:
    """The KL penalty as Flow-GRPO's published code computes it: (mean_p - mean_q)^2 / (2 q^2), [R].

    q_R is the diffusion coefficient without sqrt(-dt) (`Transition.q_R`), so this is (-dt) times `transition_kl`: steps
    are weighted by their length. Use it to reproduce published KL coefficients, and `transition_kl` otherwise.
    """
    return transition_kl(mean_p, mean_q, q_R, reduction)
