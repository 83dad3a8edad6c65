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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import num_rows
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.guidance import ContextGuidance
from unirl.models.bagel.layout import Kind, Layout, Segment
from unirl.models.packed.contexts import Contexts, ContextVelocity, rows_of_ids
from unirl.models.packed.given_images import given_images
from unirl.models.packed.rows import KeyValues, Prefix
from unirl.models.packed.vision import Grid
from unirl.types.protocols.models import Conditions

_IMAGES = (Kind.LATENTS, Kind.VISION)
"""How a given image stands in a context."""


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


class BoundVelocity(ContextVelocity[Layout, ContextGuidance]):
    """The velocity of rows [R, L, D]."""

    def __init__(self, bundle: BagelBundle, conditions: Conditions, guidance: ContextGuidance, grid: Grid) -> None:
        super().__init__(conditions, guidance, Layout, [Segment(Kind.LATENTS, grid[0] * grid[1] + 2)])
        self._bundle = bundle
        self._grid = grid

    def combined(self, full: Tensor, *free: Tensor) -> Tensor:
        return self.guidance.guided(full, *free)

    def forward(self, x: Tensor, sigma: Tensor, step_R: Tensor, guided: tuple[int, ...]) -> Tensor:
        bagel = self._bundle.bagel
        layout = self.layout(guided, x.device)
        tokens = bagel.latent_tokens(x.flatten(0, 1), sigma, [self._grid] * len(x))
        marks = self._bundle.marks
        ids = torch.tensor([marks.image_start, marks.image_end], device=x.device).repeat(len(x))
        out = bagel.language_model(ids, None, tokens, layout, self.contexts.known)
        return bagel.llm2vae(out.images).unflatten(0, (len(x), -1)).float()

    @cached_property
    def contexts(self) -> Contexts:
        distinct: dict[tuple[Hashable, ...], int] = {}
        kept: list[list[Part]] = []

        def row_of(parts: list[Part]) -> int:
            key = tuple(part.key for part in parts)
            if key not in distinct:
                distinct[key] = len(kept)
                kept.append(parts)
            return distinct[key]

        count = num_rows(self.conditions)
        slots = ("system_text", "text", "thought", "negative_text")
        systems, texts, thoughts, negatives = (self._turns(slot, count) for slot in slots)
        images = self._images(count)
        # Of each row which one it is, and the number of parts that count where those are not all.
        full, text_free, image_free = [], [], []
        for row in range(count):
            before = [*systems[row], *images[row]]
            full.append((row_of([*before, *texts[row], *thoughts[row]]), None))
            if self.guidance.is_on and negatives[row]:
                text_free.append((row_of([*before, *negatives[row]]), None))
            elif self.guidance.is_on:
                text_free.append((full[-1][0], len(before)))
            if self.guidance.uses_images:
                image_free.append((row_of([*systems[row], *texts[row]]), None))
        known = self._run(kept)
        full, text_free, image_free = (
            [_prefix(row, kept[row][:num_parts]) for row, num_parts in found] for found in (full, text_free, image_free)
        )
        return Contexts(known, full, [text_free, image_free] if self.guidance.uses_images else [text_free])

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
        if slot not in self.conditions:
            return [[]] * count
        rows = rows_of_ids(self.conditions, slot)
        return [[Part(Segment(Kind.WORDS, len(ids)), tuple(ids), ids)] if ids else [] for ids in rows]

    def _images(self, count: int) -> list[list[Part]]:
        """For each row every image, as latents and as patches."""
        return [
            [
                self._image_part(kind, tokens, grid, image.key)
                for image in shown
                for kind, tokens, grid in zip(_IMAGES, (image.latents, image.patches), image.grids, strict=True)
            ]
            for shown in given_images(self.conditions, count)
        ]

    def _image_part(self, kind: Kind, tokens: Tensor, grid: Grid, key: Hashable) -> Part:
        marks = [self._bundle.marks.image_start, self._bundle.marks.image_end]
        return Part(Segment(kind, len(tokens) + 2), (kind, grid, key), marks, tokens, grid)


def _tokens(parts: Sequence[Part]) -> Tensor:
    return torch.cat([part.tokens for part in parts if part.tokens is not None])


def _prefix(row: int, parts: Sequence[Part]) -> Prefix:
    """The beginning of a row, which consists of these parts."""
    return Prefix(row, sum(part.segment.length for part in parts), sum(part.segment.num_positions for part in parts))
