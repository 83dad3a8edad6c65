"""What a model is conditioned on, kept with the track so that replay sees what rollout saw.

Legend: B samples, L tokens, D width, P pooled width. Text containers pad to the longest when shards join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.types.batch import Batch, per_sample, shared
from unirl.types.errors import ContractError


def _pad_tokens(tensor: Tensor | None, length: int) -> Tensor | None:
    if tensor is None or tensor.shape[1] == length:
        return tensor
    padding = tensor.new_zeros(tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)


def _check_mask(tokens: Tensor, mask: Tensor | None, where: str) -> None:
    if tokens.ndim < 2:
        raise ContractError(f"{where} must start with [B, L], got {tuple(tokens.shape)}")
    if mask is not None and mask.shape != tokens.shape[:2]:
        raise ContractError(f"attention_mask {tuple(mask.shape)} must be [B, L] of {where} {tuple(tokens.shape[:2])}")


@dataclass(kw_only=True, eq=False)
class Condition(Batch):
    """Base of every conditioning container."""


@dataclass(kw_only=True, eq=False)
class TextEmbedCondition(Condition):
    """Encoded text."""

    embeds: Tensor = per_sample()
    """[B, L, D]."""
    pooled: Tensor | None = per_sample(default=None)
    """[B, P]."""
    attention_mask: Tensor | None = per_sample(default=None)
    """[B, L], 1 where a token counts. Absent means that every token counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_mask(self.embeds, self.attention_mask, "TextEmbedCondition.embeds")

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        length = max((part.embeds.shape[1] for part in parts), default=0)
        ragged = [part for part in parts if part.embeds.shape[1] != length]
        if any(part.attention_mask is None for part in ragged):
            raise ContractError(
                f"text embeddings of lengths {sorted({part.embeds.shape[1] for part in parts})} cannot join without an "
                "attention_mask: padded tokens would be attended to"
            )
        if not ragged:
            return parts
        return [
            part.replace(
                embeds=_pad_tokens(part.embeds, length), attention_mask=_pad_tokens(part.attention_mask, length)
            )
            for part in parts
        ]


@dataclass(kw_only=True, eq=False)
class TextTokenCondition(Condition):
    """Token ids, for models that embed text themselves."""

    input_ids: Tensor = per_sample()
    """[B, L] int64."""
    attention_mask: Tensor = per_sample()
    """[B, L], 1 where a token counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_mask(self.input_ids, self.attention_mask, "TextTokenCondition.input_ids")

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        length = max((part.input_ids.shape[1] for part in parts), default=0)
        return [
            part.replace(
                input_ids=_pad_tokens(part.input_ids, length), attention_mask=_pad_tokens(part.attention_mask, length)
            )
            for part in parts
        ]


@dataclass(kw_only=True, eq=False)
class ImageLatentCondition(Condition):
    """Latents of an image or video given as input (start latents, reference image)."""

    latents: Tensor = per_sample()
    """[B, C, H, W] or [B, C, F, H, W]."""


@dataclass(kw_only=True, eq=False)
class ImageEmbedCondition(Condition):
    """Features of a vision encoder."""

    embeds: Tensor = per_sample()
    """[B, L, D]."""
    attention_mask: Tensor | None = per_sample(default=None)
    """[B, L], 1 where a feature counts. Absent means that every feature counts."""
    spatial_shapes: list[tuple[int, int]] | None = shared(default=None)
    """(H, W) in patches, the same for every sample."""


@dataclass(kw_only=True, eq=False)
class FusedMultimodalCondition(Condition):
    """One sequence of text and image tokens, for models that attend over both."""

    input_ids: Tensor = per_sample()
    """[B, L] int64."""
    attention_mask: Tensor = per_sample()
    """[B, 1, L, L] bool."""
    position_ids: Tensor = per_sample()
    """[B, L] int64."""
    rope_cache: tuple[Tensor, Tensor] | None = shared(default=None)
    """(cos, sin)."""
