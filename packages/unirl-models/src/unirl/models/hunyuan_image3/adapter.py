"""HunyuanImage3 as a diffusion model: how it answers the adapter's questions.

Legend: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unirl.models.adapter import (
    DiffusionAdapter,
    num_rows,
    refuse_ignored,
    refuse_unread,
    require_condition,
)
from unirl.models.guidance import INTERVAL_KEY, Guidance, require_negative_prompt
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.contexts import BoundVelocity
from unirl.models.hunyuan_image3.layout import Grid
from unirl.models.hunyuan_image3.pictures import given_pictures
from unirl.models.hunyuan_image3.sizes import require_size
from unirl.models.hunyuan_image3.template import Template
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, TextTokenCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

THOUGHT = "thought"
"""Slot of what the model wrote before it draws."""

STEP_CACHES = frozenset({"use_taylor_cache", "taylor_cache_interval", "taylor_cache_order"})
"""Settings of published pipelines that leave out blocks at some steps."""


class HunyuanImage3Adapter(DiffusionAdapter):
    """Conditions: "text", the words up to the image that is made, what the request brings as "thought" included;
    "negative_text" where guidance is on, the same with <cfg> for every word of prompt and thought; and of given images
    "latents" and "patches".

    system_prompt: see `Template`. decode_batch_size: most images in one call of the autoencoder.
    """

    def __init__(
        self, bundle: HunyuanImage3Bundle, *, system_prompt: str | None = None, decode_batch_size: int = 1
    ) -> None:
        if decode_batch_size < 1:
            raise ConfigError(f"decode_batch_size = {decode_batch_size} must be at least 1")
        self._bundle = bundle
        self.decode_batch_size = decode_batch_size
        self._template = Template(
            bundle.tokenizer,
            bundle.words,
            bundle.style,
            drops_thoughts=bundle.drops_thoughts,
            system_prompt=system_prompt,
        )

    @property
    def bundle(self) -> HunyuanImage3Bundle:
        """The modules."""
        return self._bundle

    # Geometry --------------------------------------------------------------------------------------------------------

    def grid(self, params: DiffusionSamplingParams) -> Grid:
        """Rows and columns of latent tokens. Raises ConfigError for a size that the model has no word for."""
        factor = self.bundle.config.vae.factor
        require_size(params.height, params.width, self.bundle.sizes, factor)
        return params.height // factor, params.width // factor

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, H / 16, W / 16)."""
        self._check(params)
        return self.bundle.config.vae.latent_channels, *self.grid(params)

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """Latent tokens."""
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
            raise ContractError(
                f"HunyuanImage3 is conditioned on text: primitives need 'text': Texts of B prompts, got {got}"
            )
        thoughts = primitives.get(THOUGHT, Texts(texts=[""] * len(texts.texts)))
        if not isinstance(thoughts, Texts) or len(thoughts.texts) != len(texts.texts):
            raise ContractError(f"{THOUGHT!r} must be Texts, one per prompt; got {type(thoughts).__name__}")
        pictures = given_pictures(self.bundle, primitives)
        images = pictures.ids if pictures is not None else [[]] * len(texts.texts)
        rows = list(zip(texts.texts, thoughts.texts, images, strict=True))
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
        """Prompts, thoughts and images, padded on the right."""
        place = require_size(params.height, params.width, self.bundle.sizes, self.bundle.config.vae.factor)
        ids = [
            torch.tensor(
                self._template.prompt(text, images, is_masked=is_masked)
                + self._template.before_image(thought, place, is_masked=is_masked),
                device=self.bundle.device,
            )
            for text, thought, images in rows
        ]
        return TextTokenCondition(
            input_ids=pad_sequence(ids, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        )

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """The contexts of all rows run once, at the first call; every call runs time step and image after them."""
        guidance = Guidance.from_params(params)
        for slot in ("text", "negative_text") if guidance.is_on else ("text",):
            require_condition(conditions, slot, TextTokenCondition)
        num_rows(conditions)
        return BoundVelocity(self.bundle, conditions, guidance, self.grid(params))

    def keeping_experts(self, conditions: Conditions, params: DiffusionSamplingParams) -> BoundVelocity:
        """As `bind`, of conditions without experts; it remembers those that the gates choose."""
        return BoundVelocity(
            self.bundle, conditions, Guidance.from_params(params), self.grid(params), keeps_experts=True
        )

    # Pixels ----------------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        """Pixels [B, 3, H, W] float32 in [0, 1], `decode_batch_size` at a time."""
        del params
        vae = self.bundle.images.vae
        dtype = next(vae.parameters()).dtype
        parts = [
            vae.decode(part.to(dtype)).float().mul(0.5).add(0.5).clamp(0, 1)
            for part in latents.split(self.decode_batch_size)
        ]
        return Images(pixels=torch.cat(parts))

    @torch.no_grad()
    def encode_media(self, media: Images | Videos) -> Tensor:
        """Latents [B, C, h, w] of images, by the mode of the autoencoder's distribution."""
        if not isinstance(media, Images):
            raise ConfigError(f"HunyuanImage3 encodes images, got {type(media).__name__}")
        vae = self.bundle.images.vae
        dtype = next(vae.parameters()).dtype
        parts = media.in_floats().pixels.split(self.decode_batch_size)
        return torch.cat([vae.encode((part * 2 - 1).to(self.bundle.device, dtype)).float() for part in parts])

    def _check(self, params: DiffusionSamplingParams) -> None:
        caches = sorted(STEP_CACHES & params.sampler_kwargs.keys())
        if caches:
            raise ConfigError(
                f"sampler_kwargs {caches}: a cache that leaves out blocks at some steps makes each velocity depend on "
                "the steps before it, so a replay of single steps is not what was sampled. Remove them."
            )
        refuse_ignored(params, self.bundle.family, {"guidance_scale"}, {INTERVAL_KEY})
        Guidance.from_params(params)
