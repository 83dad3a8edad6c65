"""Variance-preserving models (DDPM, DDIM: SDXL, CogVideoX) in the coordinates of flow matching.

Such a model knows z = sqrt(abar) x0 + sqrt(1 - abar) eps and an integer timestep. Scaled, z is a latent of flow
matching:

    sigma = sqrt(1 - abar) / (sqrt(abar) + sqrt(1 - abar)),    m = sqrt((1 - sigma)^2 + sigma^2),
    x = m z = (1 - sigma) x0 + sigma eps,    sqrt(abar) = (1 - sigma) / m,    sqrt(1 - abar) = sigma / m.

So nothing but the model's own call changes coordinates: loop, kernels and algorithms see x, sigma and v = eps - x0. A
deterministic DDIM step of z is the Euler step of x, one with noise is `DDIMStrategy`. Both ends agree: m = 1 at
sigma = 0 (what is decoded) and at sigma = 1. Why: docs/design/variance-preserving.md of the repository.
`sigma_R` [R] is one level per row; dtypes follow the inputs. Shape letters: see `unirl.sde`.
"""

from typing import Literal, get_args

from torch import Tensor

from unirl.sde.likelihood import Reduction, check_reduction
from unirl.sde.rows import check_rows, check_same_shape, over_rows

PredictionType = Literal["epsilon", "v_prediction", "sample"]
"""What the model was trained to predict: eps, sqrt(abar) eps - sqrt(1 - abar) x0, or x0; diffusers' names."""


def sigma_of(alphas_cumprod: Tensor) -> Tensor:
    """sqrt(1 - abar) / (sqrt(abar) + sqrt(1 - abar)), elementwise; abar in [0, 1], 1 gives 0 and 0 gives 1."""
    noise = (1 - alphas_cumprod).sqrt()
    return noise / (alphas_cumprod.sqrt() + noise)


def alphas_cumprod_of(sigma: Tensor) -> Tensor:
    """abar = (1 - sigma)^2 / ((1 - sigma)^2 + sigma^2), elementwise: the inverse of `sigma_of`."""
    return ((1 - sigma) / flow_scale(sigma)).square()


def flow_scale(sigma: Tensor) -> Tensor:
    """m = sqrt((1 - sigma)^2 + sigma^2), elementwise, in [sqrt(1/2), 1]: x = m z."""
    return ((1 - sigma).square() + sigma.square()).sqrt()


def to_flow(z: Tensor, sigma_R: Tensor) -> Tensor:
    """x = m z, [R, ...]: the model's latents in the coordinates of flow matching. Raises ValueError for bad shapes."""
    check_rows(z, sigma_R=sigma_R)
    return z * over_rows(flow_scale(sigma_R), z)


def from_flow(x: Tensor, sigma_R: Tensor) -> Tensor:
    """z = x / m, [R, ...]: what the model is fed. Raises ValueError for bad shapes."""
    check_rows(x, sigma_R=sigma_R)
    return x / over_rows(flow_scale(sigma_R), x)


def flow_velocity(output: Tensor, x: Tensor, sigma_R: Tensor, prediction_type: PredictionType) -> Tensor:
    """The velocity eps - x0 that a model's output implies at x, [R, ...].

    output: what the model gave at z = x / m. x: the latent in the coordinates of flow matching.
        epsilon: (output - x) / (1 - sigma), undefined at sigma = 1, where eps says nothing of x0.
        sample: (x - output) / sigma, undefined at sigma = 0.
        v_prediction: (output + (2 sigma - 1) z) / m, defined everywhere.
    All are affine in the output with the same x, so guidance of velocities is guidance of outputs.
    Raises ValueError for bad shapes or an unknown prediction type.
    """
    check_rows(x, sigma_R=sigma_R)
    check_same_shape(x, output=output)
    sigma = over_rows(sigma_R, x)
    if prediction_type == "epsilon":
        return (output - x) / (1 - sigma)
    if prediction_type == "sample":
        return (x - output) / sigma
    if prediction_type == "v_prediction":
        scale = flow_scale(sigma)
        return (output + (2 * sigma - 1) * (x / scale)) / scale
    raise ValueError(f"prediction_type = {prediction_type!r} is not one of {get_args(PredictionType)}.")


def published_log_prob(logp_R: Tensor, sigma_next_R: Tensor, num_elements: int, reduction: Reduction) -> Tensor:
    """The log-density of z_next, as DDPO's code takes it, from that of x_next, [R].

    logp_R: a Gaussian kernel's, with this reduction over the N latent elements. x = m z with one m per row, so the
    density of z is m^N times that of x: the two differ by a constant of the step, and ratios, gradients and KL do not.
    """
    check_reduction(reduction)
    check_rows(logp_R, sigma_next_R=sigma_next_R)
    return logp_R + (num_elements if reduction == "sum" else 1) * flow_scale(sigma_next_R).log()
