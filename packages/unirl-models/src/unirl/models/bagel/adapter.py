"""BAGEL as a diffusion model: how it answers the adapter's questions.

Legend: R rows, L latent tokens of an image, D numbers of one; others see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.adapter import check_multiples
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.contexts import BoundVelocity
from unirl.models.bagel.guidance import SAMPLER_KWARGS, ContextGuidance
from unirl.models.bagel.images import Sides
from unirl.models.diffusers_pipeline.references import distinct, pictures_of
from unirl.models.guidance import require_negative_prompt
from unirl.models.packed.adapter import THOUGHT, PackedAdapter
from unirl.models.packed.patches import grid_of, image_of, joined_patches, patches_of
from unirl.types.conditions import Condition, TextTokenCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive
from unirl.types.sampling import DiffusionSamplingParams


class BagelAdapter(PackedAdapter[BagelBundle]):
    """Conditions: "system_text" where there is a system prompt, "text", "thought" where the request brings one,
    "negative_text" where guidance is on (the empty text is no text at all), and of given images "latents",
    "patches".

    system_prompt: a turn ahead of everything, which all three contexts keep; the published code sets one where the
        model thinks. decode_batch_size: most images in one call of the autoencoder.
    reference_sides: shortest and longest side that given images are resized to.
    """

    velocity_class = BoundVelocity
    guidance_class = ContextGuidance
    used_sampler_kwargs = SAMPLER_KWARGS

    def __init__(
        self,
        bundle: BagelBundle,
        *,
        system_prompt: str | None = None,
        decode_batch_size: int = 8,
        reference_sides: Sequence[int] = (512, 1024),
    ) -> None:
        super().__init__(bundle, decode_batch_size=decode_batch_size)
        if len(reference_sides) != 2 or not 1 <= reference_sides[0] <= reference_sides[1]:
            raise ConfigError(f"reference_sides = {list(reference_sides)} must be [shortest, longest]")
        self._system_prompt = system_prompt
        config = bundle.config
        of_latents = config.max_latent_size * config.pixels_per_token
        self._reference_sides = Sides(
            reference_sides[0], min(reference_sides[1], of_latents), multiple=config.pixels_per_token
        )

    # Geometry --------------------------------------------------------------------------------------------------------

    def grid(self, params: DiffusionSamplingParams) -> tuple[int, int]:
        """Rows and columns of latent tokens. Raises ConfigError for sides that do not divide or exceed the table."""
        config = self.bundle.config
        size, most = config.pixels_per_token, config.max_latent_size
        check_multiples(params, size, reason=f"VAE {config.vae.factor} x patch {config.latent_patch}")
        grid = params.height // size, params.width // size
        if max(grid) > most:
            raise ConfigError(
                f"{params.height} x {params.width} pixels are {grid[0]} x {grid[1]} latent tokens; the checkpoint has "
                f"positions for {most} x {most}. Use sides of at most {most * size} pixels."
            )
        return grid

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(L, D)."""
        self.check_params(params)
        return self.image_seq_len(params), self.bundle.config.token_width

    # Conditions ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts, "thought" what was written after each, "image" its images."""
        texts, thoughts = self.texts_of(primitives, params)
        conditions: dict[str, Condition] = {"text": self._turns(texts)}
        if self._system_prompt is not None:
            conditions["system_text"] = self._turns([self._system_prompt] * len(texts))
        if thoughts is not None:
            conditions[THOUGHT] = self._turns(thoughts)
        if params.uses_guidance:
            negative = require_negative_prompt(params)
            conditions["negative_text"] = self._turns([negative] * len(texts), drops_empty=True)
        pictures = pictures_of(primitives, self.bundle.family, fewest=0, most=None)
        return conditions if pictures is None else conditions | self._pictures(pictures)

    def _turns(self, texts: Sequence[str], *, drops_empty: bool = False) -> TextTokenCondition:
        """drops_empty: an empty text is no turn."""
        turns = {text: [] if drops_empty and not text else self.bundle.turn(text) for text in set(texts)}
        return self.padded([turns[text] for text in texts])

    # Pixels ----------------------------------------------------------------------------------------------------------

    def to_vae(self, latents: Tensor, params: DiffusionSamplingParams) -> Tensor:
        return image_of(latents, self.grid(params), self.bundle.config.latent_patch)

    def from_vae(self, latents: Tensor) -> Tensor:
        return torch.stack([patches_of(each, self.bundle.config.latent_patch) for each in latents])

    def _pictures(self, samples: Sequence[Sequence[Tensor]]) -> dict[str, Condition]:
        """For the images of each sample, the latent tokens and the patches for the vision tower, each distinct one
        made once. The tower sees what the autoencoder does, resized again, as in the published code."""
        config, device = self.bundle.config, self.bundle.device
        pictures, places = distinct(samples)
        resized = [self._reference_sides.resized(picture) for picture in pictures]
        latents = [self.latents_of(picture[None])[0] for picture in resized]
        seen = [self.bundle.vision_sides.resized(picture) * 2 - 1 for picture in resized]
        patches = [patches_of(picture, config.vision.patch_size) for picture in seen]
        latent_grids = [grid_of(picture, config.pixels_per_token) for picture in resized]
        patch_grids = [grid_of(picture, config.vision.patch_size) for picture in seen]
        return {
            "latents": joined_patches(latents, latent_grids, places, config.token_width, device),
            "patches": joined_patches(patches, patch_grids, places, config.vision.patch_width, device),
        }
