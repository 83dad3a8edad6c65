"""HunyuanImage3 as a diffusion model: how it answers the adapter's questions.

Legend: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unirl.models.guidance import Guidance, require_negative_prompt
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.contexts import BoundVelocity
from unirl.models.hunyuan_image3.layout import Grid
from unirl.models.hunyuan_image3.pictures import given_pictures
from unirl.models.hunyuan_image3.sizes import require_size
from unirl.models.hunyuan_image3.template import Template
from unirl.models.packed.adapter import PackedAdapter
from unirl.types.conditions import Condition, TextTokenCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

STEP_CACHES = frozenset({"use_taylor_cache", "taylor_cache_interval", "taylor_cache_order"})
"""Settings of published pipelines that leave out blocks at some steps."""


class HunyuanImage3Adapter(PackedAdapter[HunyuanImage3Bundle]):
    """Conditions: "text", the words up to the image that is made, what the request brings as "thought" included;
    "negative_text" where guidance is on, the same with <cfg> for every word of prompt and thought; and of given images
    "latents" and "patches".

    system_prompt: see `Template`. decode_batch_size: most images in one call of the autoencoder.
    """

    velocity_class = BoundVelocity

    def __init__(
        self, bundle: HunyuanImage3Bundle, *, system_prompt: str | None = None, decode_batch_size: int = 1
    ) -> None:
        super().__init__(bundle, decode_batch_size=decode_batch_size)
        self._template = Template(
            bundle.tokenizer,
            bundle.words,
            bundle.style,
            drops_thoughts=bundle.drops_thoughts,
            system_prompt=system_prompt,
        )

    # Geometry --------------------------------------------------------------------------------------------------------

    def grid(self, params: DiffusionSamplingParams) -> Grid:
        """Rows and columns of latent tokens. Raises ConfigError for a size that the model has no word for."""
        factor = self.bundle.config.vae.factor
        require_size(params.height, params.width, self.bundle.sizes, factor)
        return params.height // factor, params.width // factor

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, H / 16, W / 16)."""
        self.check_params(params)
        return self.bundle.config.vae.latent_channels, *self.grid(params)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError, too, for caches between steps."""
        caches = sorted(STEP_CACHES & params.sampler_kwargs.keys())
        if caches:
            raise ConfigError(
                f"sampler_kwargs {caches}: a cache that leaves out blocks at some steps makes each velocity depend on "
                "the steps before it, so a replay of single steps is not what was sampled. Remove them."
            )
        super().check_params(params)

    # Conditions ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts, "thought" what was written after each, "image" its images."""
        texts, thoughts = self.texts_of(primitives, params)
        pictures = given_pictures(self.bundle, primitives)
        images = pictures.ids if pictures is not None else [[]] * len(texts)
        rows = list(zip(texts, thoughts or [""] * len(texts), images, strict=True))
        conditions: dict[str, Condition] = {"text": self._tokens(rows, params)}
        if params.uses_guidance:
            negative = require_negative_prompt(params)
            if negative:
                raise ConfigError(
                    f"negative_prompt = {negative!r} means nothing to {self.bundle.family}, which puts <cfg> "
                    'instead of a prompt. Set sampling.negative_prompt: "".'
                )
            conditions["negative_text"] = self._tokens(rows, params, is_masked=True)
        return conditions if pictures is None else conditions | pictures.conditions

    def _tokens(
        self, rows: Sequence[tuple[str, str, list[int]]], params: DiffusionSamplingParams, *, is_masked: bool = False
    ) -> TextTokenCondition:
        place = require_size(params.height, params.width, self.bundle.sizes, self.bundle.config.vae.factor)
        return self.padded(
            [
                self._template.prompt(text, images, is_masked=is_masked)
                + self._template.before_image(thought, place, is_masked=is_masked)
                for text, thought, images in rows
            ]
        )

    def keeping_experts(self, conditions: Conditions, params: DiffusionSamplingParams) -> BoundVelocity:
        """As `bind`, of conditions without experts; it remembers those that the gates choose."""
        return BoundVelocity(
            self.bundle, conditions, Guidance.from_params(params), self.grid(params), keeps_experts=True
        )
