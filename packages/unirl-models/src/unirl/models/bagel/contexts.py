"""The velocity of rows with their contexts: what was said and shown before the image that is made.

A row has up to three contexts. Each is [system turn, images, prompt, thought] with parts left out:
    full         everything
    text-free    no prompt and no thought; the negative prompt in their place, where it is not empty
    image-free   no images and no thought
An image stands twice, as latents at noise level 0 and as the vision tower sees it. Equal contexts run once, and one
that another begins with does not run at all.
Legend: R rows, L latent tokens of an image, D numbers of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import num_rows, require_condition
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.guidance import ContextGuidance
from unirl.models.bagel.layout import KeyValues, Kind, Layout, Prefix, Segment
from unirl.models.packed.vision import Grid
from unirl.types.conditions import ImagePatchCondition, TextTokenCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions


@dataclass(frozen=True, eq=False)
class Part:
    """A segment of a context with what it holds."""

    segment: Segment
    key: Hashable
    """Equal of parts that hold the same."""
    ids: list[int]
    """Words, the marks around an image included."""
    tokens: Tensor | None = None
    """Latent tokens or patches of an image."""
    grid: Grid = (0, 0)


@dataclass(frozen=True)
class Contexts:
    """Where the contexts of R rows are."""

    known: KeyValues
    full: list[Prefix]
    text_free: list[Prefix]
    image_free: list[Prefix]


class BoundVelocity:
    """velocity(x_R [R, L, D], sigma_R, step_R) -> [R, L, D] float32, see `DiffusionAdapter.bind`."""

    def __init__(
        self,
        bundle: BagelBundle,
        conditions: Conditions,
        guidance: ContextGuidance,
        grid: Grid,
    ) -> None:
        self._bundle = bundle
        self._conditions = conditions
        self._guidance = guidance
        self._grid = grid
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def __call__(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        del step_R
        guided = self._guidance.guided_rows(sigma_R)
        if not guided:
            return self._forward(x_R, sigma_R, ())
        # In one forward: guided rows without prompt, without images where that guides too, then all rows.
        repeats = 2 if self._guidance.uses_images else 1
        chosen = guided * repeats + list(range(len(x_R)))
        out = self._forward(x_R[chosen], sigma_R[chosen], tuple(guided))
        free, full = out.split([repeats * len(guided), len(x_R)])
        image_free = free[len(guided) :] if self._guidance.uses_images else None
        index = torch.tensor(guided, device=x_R.device)
        return full.index_copy(0, index, self._guidance.guided(full[index], free[: len(guided)], image_free))

    def _forward(self, x: Tensor, sigma: Tensor, guided: tuple[int, ...]) -> Tensor:
        bagel = self._bundle.bagel
        layout = self._layout(guided, x.device)
        tokens = bagel.latent_tokens(x.flatten(0, 1), sigma, [self._grid] * len(x))
        marks = self._bundle.marks
        ids = torch.tensor([marks.image_start, marks.image_end], device=x.device).repeat(len(x))
        out = bagel.language_model(ids, None, tokens, layout, self.contexts.known)
        return bagel.llm2vae(out.latents).unflatten(0, (len(x), -1)).float()

    def _layout(self, guided: tuple[int, ...], device: torch.device) -> Layout:
        """Layout of one forward, cached. Steps guide the same rows, or none, so there are few."""
        if guided not in self._layouts:
            contexts = self.contexts
            chosen = [contexts.text_free[row] for row in guided]
            if self._guidance.uses_images:
                chosen += [contexts.image_free[row] for row in guided]
            chosen += contexts.full
            image = [Segment(Kind.LATENTS, self._grid[0] * self._grid[1] + 2)]
            self._layouts[guided] = Layout.of([image] * len(chosen), device, contexts=chosen, known=contexts.known)
        return self._layouts[guided]

    @cached_property
    def contexts(self) -> Contexts:
        """Keys and values of all contexts, with gradients where the experts that read them train."""
        distinct: dict[tuple[Hashable, ...], int] = {}
        kept: list[list[Part]] = []

        def row_of(parts: list[Part]) -> int:
            key = tuple(part.key for part in parts)
            if key not in distinct:
                distinct[key] = len(kept)
                kept.append(parts)
            return distinct[key]

        count = num_rows(self._conditions)
        slots = ("system_text", "text", "thought", "negative_text")
        systems, texts, thoughts, negatives = (self._turns(slot, count) for slot in slots)
        images = self._images(count)
        # Of each row which one it is, and the number of parts that count where those are not all.
        full, text_free, image_free = [], [], []
        for row in range(count):
            before = [*systems[row], *images[row]]
            full.append((row_of([*before, *texts[row], *thoughts[row]]), None))
            if self._guidance.is_on and negatives[row]:
                text_free.append((row_of([*before, *negatives[row]]), None))
            elif self._guidance.is_on:
                text_free.append((full[-1][0], len(before)))
            if self._guidance.uses_images:
                image_free.append((row_of([*systems[row], *texts[row]]), None))
        known = self._run(kept)
        full, text_free, image_free = (
            [_prefix(row, kept[row][:num_parts]) for row, num_parts in found] for found in (full, text_free, image_free)
        )
        return Contexts(known, full, text_free, image_free)

    def _run(self, rows: list[list[Part]]) -> KeyValues:
        bagel, device = self._bundle.bagel, self._bundle.device
        layout = Layout.of([[part.segment for part in row] for row in rows], device)
        parts = [part for row in rows for part in row]
        ids = torch.tensor([number for part in parts for number in part.ids], device=device)
        seen = [part for part in parts if part.segment.kind is Kind.VISION]
        shown = [part for part in parts if part.segment.kind is Kind.LATENTS]
        visual = bagel.visual_tokens(_tokens(seen), [part.grid for part in seen]) if seen else None
        latents = None
        if shown:
            clean = torch.zeros(len(shown), device=device)
            latents = bagel.latent_tokens(_tokens(shown), clean, [part.grid for part in shown])
        out = bagel.language_model(ids, visual, latents, layout, keeps_keys=True)
        return layout.extended(None, out.layers)

    def _turns(self, slot: str, count: int) -> list[list[Part]]:
        """The turn of each row in a slot, none where there is no such slot or the row is empty."""
        if slot not in self._conditions:
            return [[]] * count
        tokens = require_condition(self._conditions, slot, TextTokenCondition)
        lengths = tokens.attention_mask.sum(1).tolist()
        return [self._words(ids[:length]) for ids, length in zip(tokens.input_ids.tolist(), lengths, strict=True)]

    def _words(self, ids: list[int]) -> list[Part]:
        return [Part(Segment(Kind.WORDS, len(ids)), tuple(ids), ids)] if ids else []

    def _images(self, count: int) -> list[list[Part]]:
        """For each row every image, as latents and as patches."""
        if "latents" not in self._conditions:
            return [[]] * count
        latents, patches = (
            require_condition(self._conditions, slot, ImagePatchCondition) for slot in ("latents", "patches")
        )
        marks = [self._bundle.marks.image_start, self._bundle.marks.image_end]
        rows = []
        for *tokens, latent_grids, patch_grids in zip(
            latents.unpack("patches"), patches.unpack("patches"), latents.grids, patches.grids, strict=True
        ):
            if len(latent_grids) != len(patch_grids):
                raise ContractError(
                    f"a row has {len(latent_grids)} images as latents and {len(patch_grids)} as patches"
                )
            kinds = (Kind.LATENTS, Kind.VISION)
            of_kind = [
                _image_parts(kind, each, grids, marks)
                for kind, each, grids in zip(kinds, tokens, (latent_grids, patch_grids), strict=True)
            ]
            rows.append([part for pair in zip(*of_kind, strict=True) for part in pair])
        return rows


def _image_parts(kind: Kind, tokens: Tensor, grids: Sequence[tuple[int, int, int]], marks: list[int]) -> list[Part]:
    sizes = [rows * columns for _, rows, columns in grids]
    parts = []
    for each, (_, rows, columns) in zip(tokens.split(sizes), grids, strict=True):
        digest = hashlib.blake2b(each.float().cpu().numpy().tobytes(), digest_size=20).digest()
        segment = Segment(kind, rows * columns + 2)
        parts.append(Part(segment, (kind, rows, columns, digest), marks, each, (rows, columns)))
    return parts


def _tokens(parts: Sequence[Part]) -> Tensor:
    return torch.cat([part.tokens for part in parts if part.tokens is not None])


def _prefix(row: int, parts: Sequence[Part]) -> Prefix:
    """The beginning of a row, which consists of these parts."""
    return Prefix(row, sum(part.segment.length for part in parts), sum(part.segment.num_positions for part in parts))
