"""The adapter of diffusers families that are conditioned on text: everything but geometry, velocity and decoding.

Sketches of Qwen-Image, FLUX.2-Klein, Z-Image and Wan 2.2 on it: docs/design/model-adapter.md. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from unirl.models.adapter import DiffusionAdapter, refuse_ignored, refuse_unread, require_condition
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.embedding_cache import Embedding, EmbeddingCache, content_key
from unirl.models.guidance import INTERVAL_KEY, Guidance, classifier_free, extrapolate, require_negative_prompt
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Primitive, Texts
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams

BundleT = TypeVar("BundleT", bound=DiffusersBundle)

NEGATIVE = "negative_"
"""Prefix of a slot that replaces the slot without it in the unconditional rows."""


class TextConditionedAdapter(DiffusionAdapter, Generic[BundleT]):
    """Conditions: "text", and "negative_text" where guidance is on, each a TextEmbedCondition.

    A family says which sampling parameters it uses and answers `latent_shape`, `image_seq_len`, `predict` and
    `decode`. One with more inputs (a reference image) extends `encode` and `read_slots`, and `predict`
    finds the slot; one with several experts or state across steps answers `bind` itself.
    decode_batch_size, encode_batch_size: most images or prompts in one call of the VAE or of the text encoders.
    embedding_cache: None remembers prompts in memory; a folder also on disk; or a cache to share between adapters.
    """

    used_params: ClassVar[frozenset[str]] = frozenset({"guidance_scale", "max_sequence_length"})
    """Of the parameters that not every family has, those that this one uses, see `refuse_ignored`."""
    used_sampler_kwargs: ClassVar[frozenset[str]] = frozenset({INTERVAL_KEY})
    """Keys of `sampler_kwargs` that this family reads."""
    read_slots: ClassVar[frozenset[str]] = frozenset({"text"})
    """Slots of a request that this family reads, see `refuse_unread`."""
    default_sequence_length: ClassVar[int]
    """Tokens of a text where the request does not say."""
    longest_sequence: ClassVar[int]
    """Most tokens of a text that the model was trained with."""

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
        """The modules."""
        return self._bundle

    @abstractmethod
    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
        """Velocity [R, ...] without guidance; `conditions` has one row per row of x and no negative slots."""

    def combine(self, cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
        """The guided velocity of rows, float32. A family that rescales it overrides this."""
        return extrapolate(cond_R, uncond_R, scale)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this family would ignore, and for texts longer than it knows."""
        refuse_ignored(params, self.bundle.family, self.used_params, self.used_sampler_kwargs)
        length = params.max_sequence_length
        if length is not None and not 1 <= length <= self.longest_sequence:
            raise ConfigError(f"max_sequence_length = {length} must lie in 1..{self.longest_sequence}")

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """`primitives["text"]` holds the B prompts. Each distinct prompt is encoded once, ever, per embedding cache."""
        self.check_params(params)
        refuse_unread(primitives, self.bundle.family, self.read_slots)
        texts = primitives.get("text")
        if not isinstance(texts, Texts) or not texts.texts:
            got = {name: type(value).__name__ for name, value in primitives.items()}
            raise ContractError(
                f"{self.bundle.family} is conditioned on text: primitives need 'text': Texts of B prompts, got {got}"
            )
        length = self.default_sequence_length if params.max_sequence_length is None else params.max_sequence_length
        conditions: dict[str, Condition] = {"text": self._encode_texts(texts.texts, length)}
        if params.uses_guidance:
            negative = [require_negative_prompt(params)] * len(texts.texts)
            conditions[NEGATIVE + "text"] = self._encode_texts(negative, length)
        return conditions

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """One forward a step over [unconditional rows, conditional rows]; no state.

        Slots without a negative one are the same in both kinds of rows.
        """
        guidance = Guidance.from_params(params)
        require_condition(conditions, "text", TextEmbedCondition)
        if guidance.is_on:
            require_condition(conditions, NEGATIVE + "text", TextEmbedCondition)
        conditional = {name: value for name, value in conditions.items() if not name.startswith(NEGATIVE)}
        negative = {name.removeprefix(NEGATIVE): conditions[name] for name in conditions if name not in conditional}
        return classifier_free(self.predict, conditional, negative, guidance, combine=self.combine)

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts in the embedding cache still encode."""
        self.bundle.drop_text_encoders()

    def _encode_texts(self, texts: list[str], length: int) -> TextEmbedCondition:
        encoders = self.bundle.text
        family = self.bundle.family.lower()
        rows = self.embedding_cache.lookup(
            texts,
            lambda text: content_key(family, encoders.fingerprint, length, text),
            lambda part: _rows(encoders.encode(part, length)),
            batch_size=self.encode_batch_size,
        )
        device = self.bundle.device
        return TextEmbedCondition.concat(
            [
                TextEmbedCondition(
                    embeds=row["embeds"][None],
                    pooled=row["pooled"][None] if "pooled" in row else None,
                    attention_mask=row["attention_mask"][None] if "attention_mask" in row else None,
                )
                for row in rows
            ]
        ).to(device)


def _rows(condition: TextEmbedCondition) -> list[Embedding]:
    """One embedding per row; of a row with a mask, the tokens that count."""
    rows = []
    for row, embeds in enumerate(condition.embeds):
        embedding = {"embeds": embeds}
        if condition.pooled is not None:
            embedding["pooled"] = condition.pooled[row]
        if condition.attention_mask is not None:
            counts = condition.attention_mask[row].bool()
            embedding |= {"embeds": embeds[counts], "attention_mask": condition.attention_mask[row][counts]}
        rows.append(embedding)
    return rows
