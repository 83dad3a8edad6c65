"""Images of a request, as HunyuanImage3 takes them.

For the autoencoder each is cut to one of the model's sizes; the vision tower sees it whole, in so many patches at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.references import distinct, filtered, pictures_of
from unirl.models.extras import from_extra
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.sizes import Size, nearest
from unirl.models.packed.patches import grid_of, joined_patches, patches_of
from unirl.types.conditions import Condition
from unirl.types.media import Primitive

with from_extra("diffusers"):
    from PIL import Image

_SCALE_STEP = 1e-5


@dataclass(frozen=True)
class GivenPictures:
    """The images of B samples."""

    ids: list[list[int]]
    """Per sample the words and placeholders of its images."""
    conditions: dict[str, Condition]
    """"latents" and "patches"."""


@torch.no_grad()
def given_pictures(bundle: HunyuanImage3Bundle, primitives: Mapping[str, Primitive]) -> GivenPictures | None:
    """The images in the slot "image", each distinct one encoded once; None where there is no such slot."""
    samples = pictures_of(primitives, bundle.family, fewest=0, most=None)
    if samples is None:
        return None
    config, vae = bundle.config, bundle.images.vae
    dtype, factor = next(vae.parameters()).dtype, config.vae.factor
    usable = [size for size in bundle.sizes if size[0] % factor == size[1] % factor == 0]
    pictures, places = distinct(samples)
    latents, patches, header = [], [], []
    for picture in pictures:
        size = usable[nearest(*picture.shape[-2:], usable)]
        pixels = cut_to(picture, size) * 2 - 1
        latents.append(vae.encode(pixels[None].to(bundle.device, dtype))[0].float())
        patched = patched_size(*picture.shape[-2:], config.vision.patch_size, config.most_patches)
        seen = filtered(picture, *patched, Image.Resampling.BILINEAR)
        patches.append(seen * 2 - 1)
        header.append(bundle.sizes.index(size))
    latent_grids = [(latent.shape[1], latent.shape[2]) for latent in latents]
    patch_grids = [grid_of(seen, config.vision.patch_size) for seen in patches]
    ids = [
        bundle.words.given_image(place, rows * columns, config.most_patches)
        for place, (rows, columns) in zip(header, latent_grids, strict=True)
    ]
    return GivenPictures(
        ids=[[word for place in sample for word in ids[place]] for sample in places],
        conditions={
            "latents": joined_patches(
                [latent.flatten(1).T for latent in latents],
                latent_grids,
                places,
                config.vae.latent_channels,
                bundle.device,
            ),
            "patches": joined_patches(
                [patches_of(seen, config.vision.patch_size) for seen in patches],
                patch_grids,
                places,
                config.vision.patch_width,
                bundle.device,
            ),
        },
    )


def cut_to(picture: Tensor, size: Size) -> Tensor:
    """An image [3, H, W] in [0, 1] resized by Lanczos' filter until it covers `size`, and its middle."""
    height, width = picture.shape[-2:]
    scale = max(size[0] / height, size[1] / width)
    covering = round(height * scale), round(width * scale)
    whole = filtered(picture, *covering, Image.Resampling.LANCZOS)
    top, left = round((covering[0] - size[0]) / 2), round((covering[1] - size[1]) / 2)
    return whole[:, top : top + size[0], left : left + size[1]]


def patched_size(height: int, width: int, patch: int, most: int) -> Size:
    """The largest size, at nearly the same ratio and in whole patches, of at most `most` patches."""

    def at(scale: float) -> Size:
        rows, columns = (max(patch, math.ceil(side * scale / patch) * patch) for side in (height, width))
        return rows, columns

    low, high = _SCALE_STEP / 10, 100.0
    while high - low >= _SCALE_STEP:
        middle = (low + high) / 2
        rows, columns = at(middle)
        low, high = (middle, high) if rows * columns <= most * patch**2 else (low, middle)
    return at(low)
