"""Per-row numbers [R] against latents [R, ...]: the broadcast and the shape checks that every kernel shares."""

from torch import Tensor


def over_rows(value_R: Tensor, like: Tensor) -> Tensor:
    """`value_R` [R] viewed as [R, 1, ..., 1], to broadcast against `like` [R, ...]. No copy."""
    return value_R.reshape(-1, *(1,) * (like.ndim - 1))


def check_rows(like: Tensor, **values_R: Tensor) -> None:
    """Raises ValueError unless every keyword is a tensor of shape [R], R being the first dimension of `like`."""
    if like.ndim == 0:
        raise ValueError("latents have shape (); they need a leading row dimension [R, ...].")
    for name, value_R in values_R.items():
        if value_R.shape != like.shape[:1]:
            raise ValueError(
                f"{name} has shape {tuple(value_R.shape)} but the latents have shape {tuple(like.shape)}: "
                f"pass one {name} per row, shape ({like.shape[0]},)."
            )


def check_same_shape(like: Tensor, **values: Tensor) -> None:
    """Raises ValueError unless every keyword has the shape of `like`; a broadcast here would be a silent mistake."""
    for name, value in values.items():
        if value.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)} but the latents have shape {tuple(like.shape)}.")
