"""The recipe of a batch's initial noise: ids, a seed and a shape, so that no engine draws its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unirl.types.errors import ContractError


@dataclass(frozen=True, eq=False)
class NoiseRecipe:
    """What every engine needs to draw the same x_T. `unirl.sde.noise.initial_noise` evaluates it."""

    keys: tuple[str, ...]
    """One id a sample; samples with the same id start from the same noise."""
    base_seed: int
    latent_shape: tuple[int, ...]
    """Shape of ONE latent, without the batch."""
    initial_latents: Tensor | None = None
    """[B, *latent_shape] used verbatim instead (image to image)."""

    def __post_init__(self) -> None:
        if self.initial_latents is not None and tuple(self.initial_latents.shape) != (
            len(self.keys),
            *self.latent_shape,
        ):
            raise ContractError(
                f"initial_latents {tuple(self.initial_latents.shape)} must be {(len(self.keys), *self.latent_shape)}"
            )


def noise_key(rollout_id: int, sample_id: str) -> str:
    """The id of a sample's noise in one rollout: noise changes from rollout to rollout."""
    return f"r{rollout_id}:{sample_id}"


def noise_keys(rollout_id: int, sample_ids: Sequence[str], group_ids: Sequence[str], *, same_noise: bool) -> list[str]:
    """Noise ids of a batch; `same_noise` shares one start among the samples of a group."""
    ids = group_ids if same_noise else sample_ids
    return [noise_key(rollout_id, i) for i in ids]
