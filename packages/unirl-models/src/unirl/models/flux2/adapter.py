"""FLUX.2: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.references import (
    REFERENCE,
    cropped,
    distinct,
    packed_references,
    pictures_of,
    resized,
    stacked,
)
from unirl.models.flux2.bundle import Flux2Bundle, Flux2DevBundle
from unirl.models.guidance import check_distilled_guidance
from unirl.models.patches import patched, places
from unirl.models.ragged_rows import in_groups
from unirl.sde.schedule import Convention, SigmaSchedule
from unirl.types.conditions import Condition, ImagePatchCondition, TextEmbedCondition
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

LARGEST_AREA = 1024 * 1024
"""Pixels of a reference image; a larger one is made smaller."""
TIME_BETWEEN_IMAGES = 10
"""On the first axis of the position; the latents that are sampled stand at 0, the first reference at 10."""

Grids = tuple[tuple[int, int, int], ...]
Flux2BundleT = TypeVar("Flux2BundleT", bound=Flux2Bundle)


class Flux2Adapter(TextConditionedAdapter[Flux2BundleT], Generic[Flux2BundleT]):
    """What dev and Klein share. Conditions: "text", and "reference" where a request brings images.

    Latents are [128, h, w]: patches of 2 x 2 of the VAE's, standardised by the statistics of its batch normalisation.
    """

    read_slots = frozenset({"text", "image"})
    default_sequence_length = 512
    longest_sequence = 512

    @property
    def geometry(self) -> Geometry:
        """(128, H / 16, W / 16) latents for the released checkpoints."""
        factor = 2 ** len(self.bundle.vae.config["block_out_channels"])
        return Geometry(self.bundle.transformer.config["in_channels"], factor)

    def schedule(self, convention: Convention | None) -> SigmaSchedule:
        """The empirical shift, unless the checkpoint's is static."""
        config = self.bundle.scheduler_config
        named = "empirical" if convention is None and config.get("use_dynamic_shifting") else convention
        return SigmaSchedule.from_scheduler_config(config, named)

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The latents of the images that a request brings, as tokens; each keeps its size up to a megapixel."""
        del params
        samples = pictures_of(primitives, self.bundle.family, fewest=0, most=self.bundle.most_images)
        if samples is None:
            return {}
        multiple = self.geometry.vae_factor
        pictures, chosen = distinct(samples)
        latents = self.image_latents([fitted(picture, multiple) for picture in pictures])
        by_sample = [[latents[place] for place in sample] for sample in chosen]
        return {REFERENCE: packed_references(by_sample, 1, self.bundle.device)}

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed sigma, and the scale of guidance where it is an input."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        scale = params.distilled_guidance_scale
        guidance_R = None if scale is None else x_R.new_full((len(x_R),), scale)
        reference = conditions.get(REFERENCE)
        if not isinstance(reference, ImagePatchCondition):
            return self._forward(x_R, sigma_R, guidance_R, text.embeds, None, ())

        def forward(rows: list[int]) -> Tensor:
            tokens = stacked(reference, rows)
            guidance = None if guidance_R is None else guidance_R[rows]
            return self._forward(
                x_R[rows], sigma_R[rows], guidance, text.embeds[rows], tokens, reference.grids[rows[0]]
            )

        return in_groups(reference.grids, forward, self.bundle.any_rank)

    def _forward(
        self,
        x_R: Tensor,
        sigma_R: Tensor,
        guidance_R: Tensor | None,
        text_RLD: Tensor,
        reference_RLD: Tensor | None,
        grids: Grids,
    ) -> Tensor:
        """Rows of one grid of references: the latents first, then each reference at its own time."""
        transformer, device = self.bundle.transformer, x_R.device
        dtype = next(transformer.parameters()).dtype
        height, width = x_R.shape[-2:]
        tokens = patched(x_R, 1).to(dtype)
        img_ids = [places(1, height, width, 1, device=device)]
        if reference_RLD is not None and grids:
            tokens = torch.cat([tokens, reference_RLD.to(device, dtype)], dim=1)
            for number, grid in enumerate(grids, start=1):
                img_ids.append(places(*grid, 1, device=device, first=TIME_BETWEEN_IMAGES * number))
        out = transformer(
            hidden_states=tokens,
            timestep=sigma_R,
            guidance=guidance_R,
            encoder_hidden_states=text_RLD.to(device, dtype),
            img_ids=torch.cat(img_ids),
            txt_ids=places(1, 1, 1, text_RLD.shape[1], device=device),
            return_dict=False,
        )[0]
        return out[:, : height * width].mT.unflatten(2, (height, width))

    def to_vae(self, latents: Tensor) -> Tensor:
        """Mean and deviation back, patches taken apart."""
        latents = latents.to(self.bundle.vae.dtype)
        mean, std = self._moments(latents)
        return pixel_shuffle(latents * std + mean, 2)

    def from_vae(self, latents: Tensor) -> Tensor:
        """Standardised patches."""
        latents = pixel_unshuffle(latents, 2)
        mean, std = self._moments(latents)
        return (latents - mean) / std

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.bundle.vae.bn
        std = (norm.running_var + self.bundle.vae.config["batch_norm_eps"]).sqrt()
        return norm.running_mean[:, None, None].to(latents), std[:, None, None].to(latents)


class Flux2DevAdapter(Flux2Adapter[Flux2DevBundle]):
    """FLUX.2 dev, whose guidance is an input, `distilled_guidance_scale`: the stock pipeline's `guidance_scale`.

    The stock pipeline has no other guidance and no negative prompt.
    """

    used_params = frozenset({"distilled_guidance_scale", "max_sequence_length"})
    used_sampler_kwargs = frozenset()

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this family would ignore, and for the lack of a scale."""
        super().check_params(params)
        bundle = self.bundle
        check_distilled_guidance(params, bundle.family, takes=bundle.embeds_guidance, released=bundle.released_guidance)


def fitted(picture: Tensor, multiple: int) -> Tensor:
    """A reference [3, H, W] at most LARGEST_AREA large, in proportion, and cropped to sides that divide."""
    height, width = picture.shape[-2:]
    if height * width > LARGEST_AREA:
        scale = math.sqrt(LARGEST_AREA / (width * height))
        picture = resized(picture, int(height * scale), int(width * scale))
    return cropped(picture, multiple)
