"""The forward (noising) process of flow matching and the conversions between what a model may predict.

x_sigma = (1 - sigma) x0 + sigma eps and v = eps - x0, so x0 = x - sigma v and eps = x + (1 - sigma) v.
`sigma_R` [R] is one noise level per row in [0, 1]; dtypes follow the inputs. Shape letters: see `unirl.sde`.
"""

from torch import Tensor

from unirl.sde.rows import check_rows, check_same_shape, over_rows


def interpolate(x0: Tensor, noise: Tensor, sigma_R: Tensor) -> Tensor:
    """The noised latent (1 - sigma) x0 + sigma noise, [R, ...]. Raises ValueError if shapes disagree."""
    check_rows(x0, sigma_R=sigma_R)
    check_same_shape(x0, noise=noise)
    sigma = over_rows(sigma_R, x0)
    return (1 - sigma) * x0 + sigma * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """What a flow-matching model regresses to: d x_sigma / d sigma = noise - x0, [R, ...]."""
    check_same_shape(x0, noise=noise)
    return noise - x0


def predict_x0(x: Tensor, velocity: Tensor, sigma_R: Tensor) -> Tensor:
    """The clean latent implied by a velocity: x - sigma v, [R, ...]. Raises ValueError if shapes disagree."""
    check_rows(x, sigma_R=sigma_R)
    check_same_shape(x, velocity=velocity)
    return x - over_rows(sigma_R, x) * velocity


def predict_noise(x: Tensor, velocity: Tensor, sigma_R: Tensor) -> Tensor:
    """The noise implied by a velocity: x + (1 - sigma) v, [R, ...]. Raises ValueError if shapes disagree."""
    check_rows(x, sigma_R=sigma_R)
    check_same_shape(x, velocity=velocity)
    return x + (1 - over_rows(sigma_R, x)) * velocity
