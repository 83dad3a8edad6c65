"""Images of prompts, as conditions hold them and as the decoder reads them.

Legend: C h w latent, N patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.packed.vision import Grid
from unirl.types.conditions import ImagePatchCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions


@dataclass(frozen=True, eq=False)
class GivenImage:
    """An image of a prompt."""

    latents: Tensor
    """[h w, C]."""
    patches: Tensor
    """[N, numbers]."""
    grids: tuple[Grid, Grid]
    """Grids of the latents and of the patches."""
    key: Hashable
    """Equal of images that look the same."""


def given_images(conditions: Conditions, count: int) -> list[list[GivenImage]]:
    """The images of each row; none where the conditions have no slots for them."""
    if "latents" not in conditions:
        return [[]] * count
    latents, patches = (require_condition(conditions, slot, ImagePatchCondition) for slot in ("latents", "patches"))
    rows = []
    for *tensors, latent_grids, patch_grids in zip(
        latents.unpack("patches"), patches.unpack("patches"), latents.grids, patches.grids, strict=True
    ):
        if len(latent_grids) != len(patch_grids):
            raise ContractError(f"a row has {len(latent_grids)} images as latents and {len(patch_grids)} as patches")
        parts = [
            tensor.split([height * width for _, height, width in grids])
            for tensor, grids in zip(tensors, (latent_grids, patch_grids), strict=True)
        ]
        rows.append(
            [
                GivenImage(latent, patch, (latent_grid[1:], patch_grid[1:]), _digest(latent, patch))
                for latent, patch, latent_grid, patch_grid in zip(*parts, latent_grids, patch_grids, strict=True)
            ]
        )
    return rows


def grids_of(images: ImagePatchCondition) -> Tensor:
    """int64 [I, 2], the grids of the images of all rows."""
    grids = [grid[1:] for sample in images.grids for grid in sample]
    return torch.tensor(grids, device=images.patches.device)


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=20)
    for tensor in tensors:
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.digest()
