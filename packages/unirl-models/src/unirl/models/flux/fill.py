"""FLUX.1 Fill: the image around a hole, and the hole, next to each latent token. Shape letters: see `unirl.models`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import masked_pictures
from unirl.models.flux.adapter import FluxTextAdapter
from unirl.models.flux.bundle import FluxFillBundle
from unirl.models.patches import packed_2x2
from unirl.types.conditions import Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

MASKED = "masked"
"""Slot of the condition."""


class FluxFillAdapter(FluxTextAdapter[FluxFillBundle]):
    """Conditions: "text" with pooled vectors, and "masked": [B, 80, h, w], the latents of the image without its hole
    and the hole's pixels by latent element.

    A request brings an "image" and a "mask" per sample, white where to fill; both are resized to the size that is
    sampled. The guidance is an input (released with 30); the stock pipeline has no other.
    """

    used_params = frozenset({"distilled_guidance_scale", "max_sequence_length"})
    used_sampler_kwargs = frozenset()
    read_slots = frozenset({"text", "image", "mask"})

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Raises ConfigError for a sample without an image or a mask, or with several."""
        pictures, masks = masked_pictures(primitives, self.bundle.family, params.height, params.width)
        holes = [mask[0] >= 0.5 for mask in masks]
        # Half grey is 0 in the VAE's range, as the stock pipeline masks.
        holed = [torch.where(hole, 0.5, picture) for picture, hole in zip(pictures, holes, strict=True)]
        latents = torch.stack(self.image_latents(holed))
        by_element = pixel_unshuffle(torch.stack(holes)[:, None].to(latents), self.geometry.vae_factor)
        return {MASKED: ImageLatentCondition(latents=torch.cat([latents, by_element], dim=1))}

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        text = require_condition(conditions, "text", TextEmbedCondition)
        masked = require_condition(conditions, MASKED, ImageLatentCondition)
        return self.forward(x_R, sigma_R, text, params, beside=packed_2x2(masked.latents.to(x_R.device)))
