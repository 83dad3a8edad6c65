"""Autoencoders that work in tiles and in spans of frames, which bounds their memory whatever the size of the media.

Shape letters: see `unirl.models`; f latent frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.rules import OVERLAP
from unirl.types.errors import ConfigError


def work_in_tiles(vae: Any, pixels: int) -> None:  # Any: the VAEs of diffusers share no base class
    """Let a VAE encode and decode in tiles of `pixels` on a side. The seams differ from what it makes at once.

    Raises ConfigError if a quarter of a tile is no whole number of latents.
    """
    factor = _pixels_per_latent(vae)
    if pixels < 1 or pixels % (OVERLAP * factor):
        nearest = max(1, round(pixels / (OVERLAP * factor))) * OVERLAP * factor
        raise ConfigError(
            f"vae_tile_pixels = {pixels} is not divisible by {OVERLAP * factor}, {OVERLAP} latents of {factor} pixels. "
            f"The nearest that is: {nearest}."
        )
    keywords = inspect.signature(vae.enable_tiling).parameters
    own = pixels - pixels // OVERLAP
    sizes: dict[str, float] = {"tile_sample_min_size": pixels, "tile_overlap_factor": 1 / OVERLAP}
    for side in ("height", "width"):
        sizes |= {
            f"tile_sample_min_{side}": pixels,
            f"tile_sample_stride_{side}": own,
            f"tile_sample_min_overlap_{side}": pixels // OVERLAP,
            f"tile_latent_min_{side}": pixels // factor,
            f"tile_overlap_factor_{side}": 1 / OVERLAP,
        }
    vae.enable_tiling(**{key: value for key, value in sizes.items() if key in keywords})
    if not keywords:  # AutoencoderKL and its kin have attributes instead of keywords
        vae.tile_sample_min_size, vae.tile_latent_min_size = pixels, pixels // factor
        vae.tile_overlap_factor = 1 / OVERLAP


def decoded_in_spans(
    decode: Callable[[Tensor], Tensor], latents_BCfhw: Tensor, *, num_frames: int, factor: int
) -> Tensor:
    """Pixels [B, 3, F, H, W] of videos, `num_frames` decoded at a time.

    decode: f latent frames to factor (f - 1) + 1 frames, the first latent frame being one of them. num_frames: of a
    span, factor k + 1 with k of 2 or more. A span shares a quarter of its latent frames, one at least, with the next,
    where the two are blended, and all but the first leave out the frame that their first latent frame would be alone.
    """
    length = (num_frames - 1) // factor + 1
    shared = max(1, length // OVERLAP)
    num_blended = shared * factor
    ramp = torch.linspace(0, 1, num_blended + 2, device=latents_BCfhw.device)[1:-1].view(-1, 1, 1)
    parts: list[Tensor] = []
    start = 0
    while True:
        span = decode(latents_BCfhw[:, :, start : start + length])
        if parts:
            before, after = parts.pop(), span[:, :, 1 : 1 + num_blended]
            blended = before + (after - before) * ramp.to(span.dtype)
            span = torch.cat([blended, span[:, :, 1 + num_blended :]], dim=2)
        if start + length >= latents_BCfhw.shape[2]:
            return torch.cat([*parts, span], dim=2) if parts else span
        # A copy, so that the frames that the next span replaces are let go.
        parts += [span[:, :, :-num_blended].clone(), span[:, :, -num_blended:]]
        start += length - 1 - shared


def _pixels_per_latent(vae: Any) -> int:  # Any: as above
    ratio = vars(vae).get("spatial_compression_ratio", vae.config.get("spatial_compression_ratio"))
    return int(ratio or 2 ** (len(vae.config["block_out_channels"]) - 1))
