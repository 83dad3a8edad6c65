"""What a model is conditioned on, kept with the track so that replay sees what rollout saw.

Legend: B samples, L tokens, D width, P pooled width. Text containers pad to the longest when shards join.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.types.batch import Batch, packed, per_sample, shared
from unirl.types.errors import ContractError

NEGATIVE = "negative_"
"""Prefix of a slot that replaces the slot without it in the unconditional rows of guidance."""


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

    @property
    def mask(self) -> Tensor:
        """`attention_mask`, for models that want one; ones where it is absent."""
        if self.attention_mask is not None:
            return self.attention_mask
        return torch.ones(self.embeds.shape[:2], dtype=torch.long, device=self.embeds.device)

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
class PromptCondition(Condition):
    """The tokens that an autoregressive model continues, samples end to end and without padding.

    Build with `PromptCondition.pack(tokens=[...])`. The placeholders of images are already expanded to as many tokens
    as the images take, so that engine and replay count the same positions.
    """

    tokens: Tensor = packed()
    """[P] int64, at least one per sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens.ndim != 1 or self.tokens.dtype != torch.long:
            raise ContractError(
                f"PromptCondition.tokens must be int64 [P], got {self.tokens.dtype} {tuple(self.tokens.shape)}"
            )
        empty = (self.lengths == 0).nonzero().flatten().tolist()
        if empty:
            raise ContractError(f"prompts {empty[:8]} are empty; a model needs at least one token to go on from")


@dataclass(kw_only=True, eq=False)
class ImagePatchCondition(Condition):
    """The images of prompts as a vision-language model's vision tower takes them. Any number of images per sample.

    Build with `ImagePatchCondition.pack(patches=[...], grids=[...])`; a sample without images has no patches and the
    empty grid `()`.
    """

    patches: Tensor = packed()
    """[N, D] float, the patches of a sample's images one after the other, in the order of the prompt."""
    grids: list[tuple[tuple[int, int, int], ...]] = per_sample()
    """(frames, rows, columns) in patches of each image of each sample."""
    places: list[tuple[int, ...]] | None = per_sample(default=None)
    """Where among the tokens of its sample, prompt and completion, those of each image begin. Absent means that all
    images stand in the prompt, where its placeholders are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places is not None and list(map(len, self.places)) != list(map(len, self.grids)):
            raise ContractError(f"the images {self.grids} have the places {self.places}; each image needs one")
        if self.patches.ndim != 2 or not self.patches.is_floating_point():
            raise ContractError(
                f"ImagePatchCondition.patches must be float [N, D], got {self.patches.dtype} "
                f"{tuple(self.patches.shape)}"
            )
        expected = [sum(math.prod(grid) for grid in sample) for sample in self.grids]
        if expected != self.lengths.tolist():
            raise ContractError(
                f"the grids {self.grids} take {expected} patches, but the samples have {self.lengths.tolist()}"
            )

    @classmethod
    def in_turns(cls, samples: Sequence[Sequence[tuple[int, Self]]]) -> Self:
        """The images of samples that saw them part by part, at least one part each: where the tokens of a part begin,
        and its images, of one sample. Raises ContractError for a part whose images have no places."""
        parts = [part for sample in samples for _, part in sample]
        if any(part.places is None for part in parts):
            raise ContractError("images of several turns need places")
        return cls.pack(
            patches=[torch.cat([part.patches for _, part in sample]) for sample in samples],
            grids=[tuple(grid for _, part in sample for grid in part.grids[0]) for sample in samples],
            places=[
                tuple(start + place for start, part in sample for place in (part.places or [()])[0])
                for sample in samples
            ],
        )


@dataclass(frozen=True)
class Bridge:
    """What stands between two turns of a model, as it reads it."""

    tokens: list[int]
    images: ImagePatchCondition | None = None
    """The images among the tokens, as one sample, with their places counted from the first of these tokens; None where
    there are none."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as tokens."""

    prompt: list[int]
    """All that stands before the model's first turn."""
    tokens: list[int]
    """The model's turns, each with the token that ends it, and what stands between them."""
    is_written: list[bool]
    """True on the model's turns."""
    images: ImagePatchCondition | None = None
    """All that is shown, as one sample, with places counted from the begin of the prompt; None where nothing is."""


@dataclass(kw_only=True, eq=False)
class SoundFrameCondition(Condition):
    """The sounds of prompts as a model's audio encoder takes them: one per sample, or none.

    Build with `SoundFrameCondition.pack(frames=[...])`; a sample without a sound has no frames.
    """

    frames: Tensor = packed()
    """[N, M] float, log-mel values of a sample's frames, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames.ndim != 2 or not self.frames.is_floating_point():
            raise ContractError(
                f"SoundFrameCondition.frames must be float [N, M], got {self.frames.dtype} {tuple(self.frames.shape)}"
            )


@dataclass(kw_only=True, eq=False)
class ExpertCondition(Condition):
    """To which experts of a mixture the tokens of a rollout went, so that a replay sends them there again.

    Build with `ExpertCondition.pack(experts=[...])`.
    """

    experts: Tensor = packed()
    """[N, K] int16, of each token that a replay reads its experts in every block, block by block."""
    of: Tensor | None = per_sample(default=None)
    """[B] int64, a digest of what each sample read, where a replay checks it."""
    steps: list[int] | None = shared(default=None)
    """For images, the denoising steps whose tokens follow the words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts.ndim != 2 or self.experts.dtype != torch.int16:
            raise ContractError(
                f"ExpertCondition.experts must be int16 [N, K], got {self.experts.dtype} {tuple(self.experts.shape)}"
            )


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
