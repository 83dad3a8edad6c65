"""A unified model as a diffusion model: what its adapters share.

Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unirl.models.adapter import (
    DiffusionAdapter,
    num_rows,
    refuse_ignored,
    refuse_unread,
    require_condition,
    require_texts,
)
from unirl.models.guidance import INTERVAL_KEY, Guidance
from unirl.models.packed.bundle import PackedBundle
from unirl.models.packed.vision import Grid
from unirl.sde.loop import Velocity
from unirl.types.conditions import TextTokenCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

THOUGHT = "thought"
"""Slot of what the model wrote before it draws."""

BundleT = TypeVar("BundleT", bound=PackedBundle)


class PackedAdapter(DiffusionAdapter, Generic[BundleT]):
    """Base of the adapters of unified models. decode_batch_size: most images in one call of the autoencoder."""

    velocity_class: ClassVar[Callable[..., Velocity]]
    """From bundle, conditions, guidance and grid to the velocity, see `bind`."""
    guidance_class: ClassVar[type[Guidance]] = Guidance
    """What sampling parameters say of guidance."""
    used_sampler_kwargs: ClassVar[frozenset[str]] = frozenset({INTERVAL_KEY})
    """What of `sampler_kwargs` this model reads."""

    def __init__(self, bundle: BundleT, *, decode_batch_size: int) -> None:
        if decode_batch_size < 1:
            raise ConfigError(f"decode_batch_size = {decode_batch_size} must be at least 1")
        self._bundle = bundle
        self.decode_batch_size = decode_batch_size

    @property
    def bundle(self) -> BundleT:
        return self._bundle

    @abstractmethod
    def grid(self, params: DiffusionSamplingParams) -> Grid:
        """Rows and columns of latent tokens. Raises ConfigError for a size that the model does not make."""

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        rows, columns = self.grid(params)
        return rows * columns

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this model would ignore."""
        refuse_ignored(params, self.bundle.family, {"guidance_scale"}, self.used_sampler_kwargs)
        self.guidance_class.from_params(params)

    # Conditions ------------------------------------------------------------------------------------------------------

    def texts_of(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> tuple[list[str], list[str] | None]:
        """The prompts of a request, and what was written after each where it says. Images are all that it may hold
        besides."""
        self.check_params(params)
        refuse_unread(primitives, self.bundle.family, {"text", THOUGHT, "image"})
        texts, thoughts = require_texts(primitives, self.bundle.family), primitives.get(THOUGHT)
        if thoughts is None:
            return texts, None
        if not isinstance(thoughts, Texts) or len(thoughts.texts) != len(texts):
            raise ContractError(f"{THOUGHT!r} must be Texts, one per prompt; got {type(thoughts).__name__}")
        return texts, thoughts.texts

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """The contexts of all rows run once, at the first call; every call runs the image that is made after them."""
        guidance = self.guidance_class.from_params(params)
        for slot in ("text", "negative_text") if guidance.is_on else ("text",):
            require_condition(conditions, slot, TextTokenCondition)
        num_rows(conditions)
        return self.velocity_class(self.bundle, conditions, guidance, self.grid(params))

    def padded(self, rows: Sequence[Sequence[int]]) -> TextTokenCondition:
        """Words of samples, padded on the right."""
        ids = [torch.tensor(row, dtype=torch.long, device=self.bundle.device) for row in rows]
        return TextTokenCondition(
            input_ids=pad_sequence(ids, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        )

    # Pixels ----------------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        """Pixels [B, 3, H, W] float32 in [0, 1], `decode_batch_size` at a time."""
        vae = self.bundle.vae
        dtype = next(vae.parameters()).dtype
        parts = [
            vae.decode(self.to_vae(part, params).to(dtype)).float().mul(0.5).add(0.5).clamp(0, 1)
            for part in latents.split(self.decode_batch_size)
        ]
        return Images(pixels=torch.cat(parts))

    @torch.no_grad()
    def encode_media(self, media: Images | Videos) -> Tensor:
        """Latents [B, ...] of images, by the mode of the autoencoder's distribution."""
        if not isinstance(media, Images):
            raise ConfigError(f"{self.bundle.family} encodes images, got {type(media).__name__}")
        parts = media.in_floats().pixels.split(self.decode_batch_size)
        return torch.cat([self.latents_of(part) for part in parts])

    def latents_of(self, pixels: Tensor) -> Tensor:
        """Latents [B, ...] float32 of pixels [B, 3, H, W] in [0, 1]."""
        vae = self.bundle.vae
        return self.from_vae(vae.encode((pixels * 2 - 1).to(self.bundle.device, next(vae.parameters()).dtype)).float())

    def to_vae(self, latents: Tensor, params: DiffusionSamplingParams) -> Tensor:
        """[B, C, h, w] of latents as they are sampled."""
        del params
        return latents

    def from_vae(self, latents: Tensor) -> Tensor:
        """The inverse of `to_vae`."""
        return latents
