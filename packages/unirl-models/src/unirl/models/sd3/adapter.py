"""Stable Diffusion 3 and 3.5: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, DiffusionAdapter, check_multiples, require_condition
from unirl.models.embedding_cache import EmbeddingCache, content_key
from unirl.models.guidance import INTERVAL_KEY, Guidance, classifier_free, require_negative_prompt
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.text import DEFAULT_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class SD3Adapter(DiffusionAdapter):
    """Conditions: "text", and "negative_text" where guidance is on, each a TextEmbedCondition with pooled vectors.

    decode_batch_size, encode_batch_size: most images or prompts in one call of the VAE or of the text encoders.
    embedding_cache: None remembers prompts in memory; a folder also on disk; or a cache to share between adapters.
    """

    def __init__(
        self,
        bundle: SD3Bundle,
        *,
        decode_batch_size: int = 8,
        encode_batch_size: int = 32,
        embedding_cache: EmbeddingCache | str | Path | None = None,
    ) -> None:
        for name, value in (("decode_batch_size", decode_batch_size), ("encode_batch_size", encode_batch_size)):
            if value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        self._bundle = bundle
        self.decode_batch_size = decode_batch_size
        self.encode_batch_size = encode_batch_size
        self.embedding_cache = (
            embedding_cache if isinstance(embedding_cache, EmbeddingCache) else EmbeddingCache(embedding_cache)
        )

    @property
    def bundle(self) -> SD3Bundle:
        """The modules."""
        return self._bundle

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        """(C, H / 8, W / 8) for the released checkpoints."""
        _check_params(params)
        factor, patch = self.bundle.vae_scale_factor, self._patch_size
        check_multiples(params, factor * patch, reason=f"VAE {factor} x patch {patch}")
        limit = self.bundle.transformer.config["pos_embed_max_size"]
        for name, value in (("height", params.height), ("width", params.width)):
            if value // (factor * patch) > limit:
                raise ConfigError(
                    f"{name} = {value} is {value // (factor * patch)} patches; the position embedding of this "
                    f"checkpoint has {limit}. Use at most {limit * factor * patch}."
                )
        channels = self.bundle.transformer.config["in_channels"]
        return channels, params.height // factor, params.width // factor

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """(H / 16) (W / 16) for the released checkpoints."""
        _, height, width = self.latent_shape(params)
        return (height // self._patch_size) * (width // self._patch_size)

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts. Each distinct prompt is encoded once, ever, per embedding cache."""
        _check_params(params)
        texts = primitives.get("text")
        if not isinstance(texts, Texts) or not texts.texts:
            got = {name: type(value).__name__ for name, value in primitives.items()}
            raise ContractError(f"SD3 is conditioned on text: primitives need 'text': Texts of B prompts, got {got}")
        length = DEFAULT_SEQUENCE_LENGTH if params.max_sequence_length is None else params.max_sequence_length
        conditions: dict[str, Condition] = {"text": self._encode_texts(texts.texts, length)}
        if params.uses_guidance:
            negative = [require_negative_prompt(params)] * len(texts.texts)
            conditions["negative_text"] = self._encode_texts(negative, length)
        return conditions

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """One forward a step over [unconditional rows, conditional rows]; no state."""
        guidance = Guidance.from_params(params)
        text = require_condition(conditions, "text", TextEmbedCondition)
        negative = require_condition(conditions, "negative_text", TextEmbedCondition) if guidance.is_on else None
        return classifier_free(self._predict, {"text": text}, None if negative is None else {"text": negative}, guidance)

    def decode(self, latents: Tensor) -> Images:
        """[B, 3, H, W] float32 in [0, 1], `decode_batch_size` images at a time."""
        vae = self.bundle.vae
        pixels = []
        for part in latents.split(self.decode_batch_size):
            part = part.to(vae.dtype) / vae.config["scaling_factor"] + vae.config["shift_factor"]
            pixels.append((vae.decode(part, return_dict=False)[0].float() * 0.5 + 0.5).clamp(0, 1))
        return Images(pixels=torch.cat(pixels))

    @torch.no_grad()
    def encode_media(self, media: Images | Videos) -> Tensor:
        """Latents [B, C, h, w] float32 of images, `decode_batch_size` at a time: the mode of the posterior, shifted and
        scaled as the transformer is trained on. Raises ConfigError for other media."""
        if not isinstance(media, Images):
            raise ConfigError(f"SD3 encodes images, got {type(media).__name__}")
        vae = self.bundle.vae
        latents = []
        for part in media.pixels.split(self.decode_batch_size):
            mode = vae.encode((part * 2 - 1).to(self.bundle.device, vae.dtype)).latent_dist.mode()
            latents.append(((mode - vae.config["shift_factor"]) * vae.config["scaling_factor"]).float())
        return torch.cat(latents)

    def drop_text_encoders(self) -> None:
        """Free the three text encoders; prompts in the embedding cache still encode."""
        self.bundle.drop_text_encoders()

    @property
    def _patch_size(self) -> int:
        return self.bundle.transformer.config["patch_size"]

    def _predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        # The first weight, not `transformer.dtype`: adapters in another dtype may follow it.
        dtype = next(transformer.parameters()).dtype
        return transformer(
            hidden_states=x_R.to(dtype),
            timestep=sigma_R * TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            pooled_projections=None if text.pooled is None else text.pooled.to(x_R.device, dtype),
            return_dict=False,
        )[0]

    def _encode_texts(self, texts: list[str], length: int) -> TextEmbedCondition:
        encoders = self.bundle.text

        def encode(part: list[str]) -> dict[str, Tensor]:
            embeds, pooled = encoders.encode(part, length)
            return {"embeds": embeds, "pooled": pooled}

        found = self.embedding_cache.lookup(
            texts,
            lambda text: content_key("sd3", encoders.fingerprint, length, text),
            encode,
            batch_size=self.encode_batch_size,
        )
        device = self.bundle.device
        return TextEmbedCondition(embeds=found["embeds"].to(device), pooled=found["pooled"].to(device))


def _check_params(params: DiffusionSamplingParams) -> None:
    """Raises ConfigError for what this family would ignore."""
    if params.num_frames != 1:
        raise ConfigError(f"num_frames = {params.num_frames}: SD3 makes images. Set sampling.num_frames: 1.")
    for name in ("guidance_scale_2", "distilled_guidance_scale"):
        if getattr(params, name) is not None:
            raise ConfigError(f"{name} = {getattr(params, name)}: SD3 has only guidance_scale. Leave {name} unset.")
    unknown = sorted(set(params.sampler_kwargs) - {INTERVAL_KEY})
    if unknown:
        raise ConfigError(f"sampler_kwargs {unknown} mean nothing to SD3; it knows only {INTERVAL_KEY!r}.")
    length = params.max_sequence_length
    if length is not None and not 1 <= length <= MAX_SEQUENCE_LENGTH:
        raise ConfigError(f"max_sequence_length = {length} must lie in 1..{MAX_SEQUENCE_LENGTH}")
