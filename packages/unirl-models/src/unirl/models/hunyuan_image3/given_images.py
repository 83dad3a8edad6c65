"""Images of prompts, as conditions hold them and as the decoder reads them.

Legend: C h w latent, N patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.hunyuan_image3.layout import Grid
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.template import WordIds
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


def image_features(
    images: ImageParts, words: WordIds, ids: Tensor, shown: Sequence[GivenImage]
) -> tuple[Tensor | None, Tensor | None]:
    """What stands for the ids [N] that are no words, and where; None of both without images.

    shown: all images, in the order of the ids.
    """
    if not shown:
        return None, None
    clean = torch.zeros(1, device=ids.device)
    visual = images.visual_tokens(torch.cat([image.patches for image in shown]), [image.grids[1] for image in shown])
    features = []
    for image, seen in zip(shown, visual, strict=True):
        latents = image.latents.T.unflatten(1, image.grids[0])[None]
        features += [images.latent_tokens(latents, clean)[0], seen]
    return torch.cat(features), (ids >= words.num_words).nonzero().flatten()


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=20)
    for tensor in tensors:
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.digest()
