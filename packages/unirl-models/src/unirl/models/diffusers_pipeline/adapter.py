"""The adapter of diffusers families that are conditioned on text: everything but geometry and velocity.

How the families answer it: docs/design/model-adapter.md. Shape letters: see `unirl.models`; F frames of pixels, f of
latents.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch
from torch import Tensor

from unirl.models.adapter import DiffusionAdapter, refuse_ignored, refuse_unread, require_condition, require_texts
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.normalisation import scaled, unscaled
from unirl.models.diffusers_pipeline.references import picture_key
from unirl.models.diffusers_pipeline.text import weights_digest
from unirl.models.diffusers_pipeline.tiling import decoded_in_spans
from unirl.models.embedding_cache import Embedding, EmbeddingCache, content_key
from unirl.models.guidance import INTERVAL_KEY, Guidance, classifier_free, extrapolate, require_negative_prompt
from unirl.sde.loop import Velocity
from unirl.sde.schedule import Convention, Schedule, SigmaSchedule
from unirl.sde.timesteps import Spacing
from unirl.types.conditions import NEGATIVE, Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Modality, Primitive, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

BundleT = TypeVar("BundleT", bound=DiffusersBundle)
Predict = Callable[[Tensor, Tensor, Conditions], Tensor]
"""predict(x_R, sigma_R, conditions) -> velocity [R, ...] without guidance, see `TextConditionedAdapter.predict`."""


class TextConditionedAdapter(DiffusionAdapter, Generic[BundleT]):
    """Conditions: "text", and "negative_text" where guidance is on, each a TextEmbedCondition.

    A family says which sampling parameters it uses and answers `geometry` and `predict`. One whose VAE has moments per
    channel answers `to_vae` and `from_vae`; one with more inputs (a reference image) answers `encode_inputs` and
    extends `read_slots`, and `predict` finds the slot; one with state across steps answers `bind` itself.
    decode_batch_size, encode_batch_size: most images or prompts in one call of the VAE or of the text encoders.
    embedding_cache: None remembers prompts in memory; a folder also on disk; or a cache to share between adapters.
    """

    used_params: ClassVar[frozenset[str]] = frozenset({"guidance_scale", "max_sequence_length"})
    """Parameters that this family uses among those that not every family has; see `refuse_ignored`."""
    used_sampler_kwargs: ClassVar[frozenset[str]] = frozenset({INTERVAL_KEY})
    """Keys of `sampler_kwargs` that this family reads."""
    read_slots: ClassVar[frozenset[str]] = frozenset({"text"})
    """Slots of a request that this family reads, see `refuse_unread`."""
    default_sequence_length: ClassVar[int]
    """Tokens of a text where the request does not say."""
    longest_sequence: ClassVar[int]
    """Most tokens of a text that the model was trained with."""
    fps: float | None = None
    """Frames per second of the videos that the model was trained on."""

    def __init__(
        self,
        bundle: BundleT,
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
    def bundle(self) -> BundleT:
        return self._bundle

    # What a family answers -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The factors of this checkpoint."""

    @abstractmethod
    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, ...] without guidance; `conditions` has one row per row of x and no negative slots."""

    def to_vae(self, latents: Tensor) -> Tensor:
        """What the VAE decodes of latents [B, ...] as they are sampled: unpacked and denormalised, in its dtype.

        By the VAE's scale and shift. A family with moments per channel overrides both ways.
        """
        return unscaled(latents.to(self.bundle.vae.dtype), self.bundle.vae.config)

    def from_vae(self, latents: Tensor) -> Tensor:
        """The inverse of `to_vae`."""
        return scaled(latents, self.bundle.vae.config)

    def texts_to_encode(self, texts: list[str], *, is_negative: bool) -> list[str]:
        """Prompts, or negative ones, as the text encoders are given them."""
        del is_negative
        return texts

    def mode_of(self, encoded: Any) -> Tensor:  # Any: what the encode of a VAE of diffusers returns
        """The latents of what the VAE's encoder returned: the mode of its distribution."""
        return encoded.latent_dist.mode()

    def combine(self, cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
        """The guided velocity of rows, float32. A family that rescales it overrides this."""
        return extrapolate(cond_R, uncond_R, scale)

    def guidance(self, params: DiffusionSamplingParams) -> Guidance:
        """How strongly rows are guided. A family with a scale per expert overrides this."""
        return Guidance.from_params(params)

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Conditions of what a request brings besides its texts, one row per sample."""
        del primitives, params
        return {}

    def schedule(self, convention: Convention | None) -> Schedule:
        """The noise levels of this checkpoint; None is the convention of the family."""
        return SigmaSchedule.from_scheduler_config(self.bundle.scheduler_config, convention)

    def spaced(self, spacing: Spacing) -> Schedule:
        """The noise levels of this checkpoint, its timesteps spaced so. Raises ConfigError for a family without."""
        raise ConfigError(
            f"schedule = {spacing!r} spaces integer timesteps, which {self.bundle.family} has none of. Use one of "
            f"{get_args(Convention)}."
        )

    # What follows from it --------------------------------------------------------------------------------------------

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, h, w), or (C, f, h, w) of a family of videos."""
        self.check_params(params)
        return self.geometry.latent_shape(params)

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        return self.geometry.num_tokens(params)

    def sequence_length(self, params: DiffusionSamplingParams) -> int:
        """Most tokens of a text."""
        return self.default_sequence_length if params.max_sequence_length is None else params.max_sequence_length

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this family would ignore, and for texts longer than it knows."""
        refuse_ignored(params, self.bundle.family, self.used_params, self.used_sampler_kwargs)
        length = params.max_sequence_length
        if length is not None and not 1 <= length <= self.longest_sequence:
            raise ConfigError(f"max_sequence_length = {length} must lie in 1..{self.longest_sequence}")

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts. Each distinct prompt is encoded once, ever, per embedding cache."""
        return self.encode_texts(primitives, params) | self.encode_inputs(primitives, params)

    def encode_texts(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The conditions of the B prompts and of the negative one; images that the text encoders see are read too."""
        self.check_params(params)
        refuse_unread(primitives, self.bundle.family, self.read_slots)
        texts = require_texts(primitives, self.bundle.family)
        length = self.sequence_length(params)
        with self.visiting_encoders():
            prompts = self.texts_to_encode(texts, is_negative=False)
            conditions: dict[str, Condition] = {**self._encode_texts(prompts, length, primitives, is_negative=False)}
            if params.uses_guidance:
                prompts = self.texts_to_encode([require_negative_prompt(params)] * len(texts), is_negative=True)
                negative = self._encode_texts(prompts, length, primitives, is_negative=True)
                conditions |= {NEGATIVE + slot: condition for slot, condition in negative.items()}
        return conditions

    @property
    def encoders_rest(self) -> bool:
        """True if text encoders rest in host memory between rollouts."""
        return self.bundle.text.resting is not None

    def visiting_encoders(self) -> AbstractContextManager[None]:
        return self.bundle.text.visiting()

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """One forward per step over [unconditional rows, conditional rows]; no state."""

        def predict(x_R: Tensor, sigma_R: Tensor, rows: Conditions) -> Tensor:
            return self.predict(x_R, sigma_R, rows, params)

        return self.guided(predict, conditions, params)

    def guided(self, predict: Predict, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """The velocity of `predict` with the guidance of `params`.

        Slots without a negative one are the same in both kinds of rows.
        """
        guidance = self.guidance(params)
        require_condition(conditions, "text", TextEmbedCondition)
        if guidance.is_on:
            require_condition(conditions, NEGATIVE + "text", TextEmbedCondition)
        conditional = {name: value for name, value in conditions.items() if not name.startswith(NEGATIVE)}
        negative = {name.removeprefix(NEGATIVE): conditions[name] for name in conditions if name not in conditional}
        return classifier_free(predict, conditional, negative, guidance, combine=self.combine)

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Pixels float32 in [0, 1], `decode_batch_size` samples at a time: [B, 3, H, W], or F frames of each sample."""
        del params
        # In place after the first product, so that a video is held twice at most.
        parts = [self._decoded(part).mul(0.5).add_(0.5).clamp_(0, 1) for part in latents.split(self.decode_batch_size)]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.modality is Modality.VIDEO:
            return Videos.pack(frames=list(pixels.movedim(1, 2)), fps=self.fps)
        return Images(pixels=pixels if pixels.ndim == 4 else pixels[:, :, 0])

    def _decoded(self, latents: Tensor) -> Tensor:
        """Pixels float32 in [-1, 1] of one call of the VAE, or of one per span of frames."""
        span = self.bundle.vae_tile_frames
        if span is None:
            return self._decoded_at_once(latents)
        factor = self.bundle.frame_divisor
        return decoded_in_spans(self._decoded_at_once, latents, num_frames=span, factor=factor)

    def _decoded_at_once(self, latents: Tensor) -> Tensor:
        latents = latents.to(self.bundle.device)  # a caller may draw some on the host
        return self.bundle.vae.decode(self.to_vae(latents), return_dict=False)[0].float()

    def encode_media(self, media: Images | Videos) -> Tensor:
        """See `vae_latents`. A family whose samples are more than their media refuses."""
        return self.vae_latents(media)

    @torch.no_grad()
    def vae_latents(self, media: Images | Videos) -> Tensor:
        """Latents float32 of media, `decode_batch_size` at a time: the mode of the posterior, normalised as the
        transformer is trained on. Raises ConfigError for media of another kind or videos of different lengths."""
        pixels = self._pixels(media.in_floats() if isinstance(media, (Images, Videos)) else media)
        vae = self.bundle.vae
        latents = []
        for part in pixels.split(self.decode_batch_size):
            encoded = vae.encode((part * 2 - 1).to(self.bundle.device, vae.dtype))
            latents.append(self.from_vae(self.mode_of(encoded)).float())
        return torch.cat(latents)

    def image_latents(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Latents [C, h, w] float32 of images [3, H, W] in [0, 1], on the model's device; [C, 1, h, w] of a family of
        videos.

        Each distinct image is encoded once, ever, per embedding cache, and alone, so that its latents do not depend
        on what else a batch holds.
        """
        family, fingerprint = self.bundle.family.lower(), self._vae_fingerprint
        keys = [content_key(family, fingerprint, picture_key(each)) for each in pictures]
        rows = self.encoded_once(keys, lambda place: {"latents": self.vae_latents(self._as_media(pictures[place]))[0]})
        return [row["latents"].to(self.bundle.device) for row in rows]

    def encoded_once(self, keys: Sequence[str], encode: Callable[[int], Embedding]) -> list[Embedding]:
        """Embeddings of media by key, each distinct one encoded once and alone; encode(place in `keys`)."""
        return self.embedding_cache.lookup(keys, lambda part: [encode(place) for place in part], batch_size=1)

    def stacked(self, rows: Sequence[Embedding]) -> ImageLatentCondition:
        """The latents of rows, on the model's device."""
        return ImageLatentCondition(latents=torch.stack([row["latents"] for row in rows]).to(self.bundle.device))

    def _as_media(self, picture: Tensor) -> Images | Videos:
        """An image [3, H, W] as what the family makes; of a family of videos one frame."""
        if self.modality is Modality.VIDEO:
            return Videos.pack(frames=[picture[None]])
        return Images(pixels=picture[None])

    @cached_property
    def _vae_fingerprint(self) -> str:
        return f"{weights_digest(self.bundle.vae).hex()} tiles {self.bundle.vae_tile_pixels}"

    def _pixels(self, media: Images | Videos) -> Tensor:
        """[B, 3, H, W] of images for a VAE of images, else [B, 3, F, H, W]."""
        wanted = Videos if self.modality is Modality.VIDEO else Images
        if not isinstance(media, wanted):
            raise ConfigError(f"{self.bundle.family} encodes {wanted.__name__.lower()}, got {type(media).__name__}")
        if isinstance(media, Images):
            is_3d = any(isinstance(module, torch.nn.Conv3d) for module in self.bundle.vae.modules())
            return media.pixels[:, :, None] if is_3d else media.pixels
        lengths = sorted(set(media.lengths.tolist()))
        if len(lengths) > 1:
            raise ConfigError(f"videos of {lengths} frames cannot be encoded together. Cut them to one length.")
        return media.frames.unflatten(0, (-1, lengths[0])).movedim(1, 2)

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        prompts = self.texts_to_encode(list(texts), is_negative=False)
        return self.bundle.text.cut_tokens(prompts, self.sequence_length(params))

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts in the embedding cache still encode.

        Raises ConfigError if the cache has let some of them go.
        """
        lost = self.embedding_cache.statistics.num_lost
        if lost:
            raise ConfigError(
                f"{lost} embeddings did not fit into the {self.embedding_cache.memory_bytes / 2**30:.3g} GiB of the "
                "embedding cache, and cannot be made again without text encoders. Set pipeline.embedding_cache to a "
                "folder, which keeps all, or engine.drop_text_encoders: false."
            )
        self.bundle.drop_text_encoders()

    def _encode_texts(
        self, texts: list[str], length: int, primitives: Mapping[str, Primitive], *, is_negative: bool
    ) -> dict[str, TextEmbedCondition]:
        """Every stream of the texts by slot. A family whose encoders see more of the request overrides this."""
        del primitives, is_negative
        encoders = self.bundle.text
        family = self.bundle.family.lower()
        return self._cached_streams(
            [content_key(family, encoders.fingerprint, length, text) for text in texts],
            lambda part: encoders.encode_streams([texts[index] for index in part], length),
        )

    def _cached_streams(
        self, keys: list[str], encode: Callable[[list[int]], Mapping[str, TextEmbedCondition]]
    ) -> dict[str, TextEmbedCondition]:
        """Streams by slot, one row per key, each distinct key encoded once; encode(places in `keys`) -> streams."""

        def missing(part: list[int]) -> list[Embedding]:
            self.bundle.text.bring()
            return _rows(encode(part))

        with self.visiting_encoders():
            rows = self.embedding_cache.lookup(keys, missing, batch_size=self.encode_batch_size)
        return {slot: _joined(rows, slot).to(self.bundle.device) for slot in _slots(rows[0])}


def _rows(streams: Mapping[str, TextEmbedCondition]) -> list[Embedding]:
    """One embedding per row, of all its streams; of one with a mask, the tokens that count."""
    rows: list[Embedding] = [{} for _ in range(streams["text"].batch_size)]
    for slot, condition in streams.items():
        for row, embeds in enumerate(condition.embeds):
            embedding = {"embeds": embeds}
            if condition.pooled is not None:
                embedding["pooled"] = condition.pooled[row]
            if condition.attention_mask is not None:
                counts = condition.attention_mask[row].bool()
                embedding |= {"embeds": embeds[counts], "attention_mask": condition.attention_mask[row][counts]}
            rows[row] |= {_prefix(slot) + name: tensor for name, tensor in embedding.items()}
    return rows


def _joined(rows: list[Embedding], slot: str) -> TextEmbedCondition:
    """A stream of all rows, padded to the longest where it is ragged."""
    at = _prefix(slot)
    return TextEmbedCondition.concat(
        [
            TextEmbedCondition(
                embeds=row[at + "embeds"][None],
                pooled=row[at + "pooled"][None] if at + "pooled" in row else None,
                attention_mask=row[at + "attention_mask"][None] if at + "attention_mask" in row else None,
            )
            for row in rows
        ]
    )


def _prefix(slot: str) -> str:
    """Prefix of the names of a stream's tensors in an embedding; those of "text" stand alone."""
    return "" if slot == "text" else f"{slot}."


def _slots(embedding: Embedding) -> list[str]:
    names = [name for name in embedding if name.endswith("embeds")]
    return [name.removesuffix("embeds").removesuffix(".") or "text" for name in names]
