"""BAGEL as a diffusion model: how it answers the adapter's questions.

Legend: R rows, L latent tokens of an image, D numbers of one; others see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unirl.models.adapter import (
    DiffusionAdapter,
    check_multiples,
    num_rows,
    refuse_ignored,
    refuse_unread,
    require_condition,
)
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.contexts import BoundVelocity
from unirl.models.bagel.guidance import SAMPLER_KWARGS, ContextGuidance
from unirl.models.bagel.images import Sides
from unirl.models.diffusers_pipeline.references import distinct, pictures_of
from unirl.models.guidance import require_negative_prompt
from unirl.models.packed.patches import grid_of, image_of, joined_patches, patches_of
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, TextTokenCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

THOUGHT = "thought"
"""Slot of what the model wrote before it draws."""


class BagelAdapter(DiffusionAdapter):
    """Conditions: "system_text" where there is a system prompt, "text", "thought" where the request brings one,
    "negative_text" where guidance is on (the empty text is no text at all), and of given images "latents",
    "patches".

    system_prompt: a turn ahead of everything, which all three contexts keep; the published code sets one where the
        model thinks. decode_batch_size: most images in one call of the autoencoder.
    reference_sides: shortest and longest side that given images are resized to.
    """

    def __init__(
        self,
        bundle: BagelBundle,
        *,
        system_prompt: str | None = None,
        decode_batch_size: int = 8,
        reference_sides: Sequence[int] = (512, 1024),
    ) -> None:
        if decode_batch_size < 1:
            raise ConfigError(f"decode_batch_size = {decode_batch_size} must be at least 1")
        if len(reference_sides) != 2 or not 1 <= reference_sides[0] <= reference_sides[1]:
            raise ConfigError(f"reference_sides = {list(reference_sides)} must be [shortest, longest]")
        self._bundle = bundle
        self.decode_batch_size = decode_batch_size
        self._system_prompt = system_prompt
        config = bundle.config
        of_latents = config.max_latent_size * config.pixels_per_token
        self._reference_sides = Sides(
            reference_sides[0], min(reference_sides[1], of_latents), multiple=config.pixels_per_token
        )

    @property
    def bundle(self) -> BagelBundle:
        """The modules."""
        return self._bundle

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
        self._check(params)
        return self.image_seq_len(params), self.bundle.config.token_width

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """L."""
        rows, columns = self.grid(params)
        return rows * columns

    # Conditions ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts, "thought" what was written after each, "image" its images."""
        self._check(params)
        refuse_unread(primitives, self.bundle.family, {"text", THOUGHT, "image"})
        texts = primitives.get("text")
        if not isinstance(texts, Texts) or not texts.texts:
            got = {name: type(value).__name__ for name, value in primitives.items()}
            raise ContractError(f"BAGEL is conditioned on text: primitives need 'text': Texts of B prompts, got {got}")
        conditions: dict[str, Condition] = {"text": self._tokens(texts.texts)}
        if self._system_prompt is not None:
            conditions["system_text"] = self._tokens([self._system_prompt] * len(texts.texts))
        thought = primitives.get(THOUGHT)
        if thought is not None:
            if not isinstance(thought, Texts) or len(thought.texts) != len(texts.texts):
                raise ContractError(f"{THOUGHT!r} must be Texts, one per prompt; got {type(thought).__name__}")
            conditions[THOUGHT] = self._tokens(thought.texts)
        if params.uses_guidance:
            negative = require_negative_prompt(params)
            conditions["negative_text"] = self._tokens([negative] * len(texts.texts), drops_empty=True)
        pictures = pictures_of(primitives, self.bundle.family, fewest=0, most=None)
        return conditions if pictures is None else conditions | self._pictures(pictures)

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """The contexts of all rows run once, at the first call; every call runs the latent tokens after them."""
        guidance = ContextGuidance.from_params(params)
        for slot in ("text", "negative_text") if guidance.is_on else ("text",):
            require_condition(conditions, slot, TextTokenCondition)
        num_rows(conditions)
        return BoundVelocity(self.bundle, conditions, guidance, self.grid(params))

    # Pixels ----------------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        """Pixels [B, 3, H, W] float32 in [0, 1], `decode_batch_size` at a time."""
        vae, grid, patch = self.bundle.vae, self.grid(params), self.bundle.config.latent_patch
        dtype = next(vae.parameters()).dtype
        parts = [
            vae.decode(image_of(part.to(dtype), grid, patch)).float().mul(0.5).add(0.5).clamp(0, 1)
            for part in latents.split(self.decode_batch_size)
        ]
        return Images(pixels=torch.cat(parts))

    @torch.no_grad()
    def encode_media(self, media: Images | Videos) -> Tensor:
        """Latent tokens [B, L, D] of images, by the mode of the autoencoder's distribution."""
        if not isinstance(media, Images):
            raise ConfigError(f"BAGEL encodes images, got {type(media).__name__}")
        tokens = [self._latent_tokens(part) for part in media.in_floats().pixels.split(self.decode_batch_size)]
        return torch.cat(tokens)

    def _latent_tokens(self, pixels: Tensor) -> Tensor:
        """[B, L, D] float32 of pixels [B, 3, H, W] in [0, 1]."""
        vae = self.bundle.vae
        dtype = next(vae.parameters()).dtype
        latents = vae.encode((pixels * 2 - 1).to(self.bundle.device, dtype)).float()
        return torch.stack([patches_of(each, self.bundle.config.latent_patch) for each in latents])

    def _pictures(self, samples: Sequence[Sequence[Tensor]]) -> dict[str, Condition]:
        """For the images of each sample, the latent tokens and the patches for the vision tower, each distinct one
        made once. The tower sees what the autoencoder does, resized again, as in the published code."""
        config, device = self.bundle.config, self.bundle.device
        pictures, places = distinct(samples)
        resized = [self._reference_sides.resized(picture) for picture in pictures]
        latents = [self._latent_tokens(picture[None])[0] for picture in resized]
        seen = [self.bundle.vision_sides.resized(picture) * 2 - 1 for picture in resized]
        patches = [patches_of(picture, config.vision.patch_size) for picture in seen]
        latent_grids = [grid_of(picture, config.pixels_per_token) for picture in resized]
        patch_grids = [grid_of(picture, config.vision.patch_size) for picture in seen]
        return {
            "latents": joined_patches(latents, latent_grids, places, config.token_width, device),
            "patches": joined_patches(patches, patch_grids, places, config.vision.patch_width, device),
        }

    # Text ------------------------------------------------------------------------------------------------------------

    def _tokens(self, texts: Sequence[str], *, drops_empty: bool = False) -> TextTokenCondition:
        """Turns of texts, padded on the right. drops_empty: an empty text is no turn."""
        turns = {text: [] if drops_empty and not text else self.bundle.turn(text) for text in set(texts)}
        rows = [torch.tensor(turns[text], dtype=torch.long, device=self.bundle.device) for text in texts]
        return TextTokenCondition(
            input_ids=pad_sequence(rows, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        )

    def _check(self, params: DiffusionSamplingParams) -> None:
        refuse_ignored(params, self.bundle.family, {"guidance_scale"}, SAMPLER_KWARGS)
        ContextGuidance.from_params(params)
