"""BAGEL's decoder as a language model: called as `unirl.models.ar` calls those of transformers.

Prompts may hold images: each stands as [begin, one placeholder per token of the vision tower, end].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from unirl.models.bagel.layout import Kind, Layout, Segment
from unirl.models.bagel.model import Bagel
from unirl.models.causal_lm.tokenizer import require_words
from unirl.models.packed.language import PackedLanguage, TextCache
from unirl.models.packed.layers import Outputs


@dataclass(frozen=True)
class MarkIds:
    """Words around turns and images, and the id that stands for a token of the vision tower."""

    text_start: int
    text_end: int
    image_start: int
    image_end: int
    visual: int
    """The first id beyond the vocabulary: no word that the model can write."""

    @classmethod
    def of(cls, tokenizer: Any, vocabulary_size: int, path: Path) -> Self:  # Any: a tokenizer of transformers
        """The ids of a tokenizer. Raises CheckpointError if it lacks a mark, or has more words than the model."""
        words = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
        return cls(*require_words(tokenizer, words, vocabulary_size, path), visual=vocabulary_size)

    def turn(self, ids: Sequence[int]) -> list[int]:
        """A text between the marks of a turn."""
        return [self.text_start, *ids, self.text_end]

    def image(self, num_tokens: int) -> list[int]:
        """The placeholders of an image between its marks."""
        return [self.image_start, *[self.visual] * num_tokens, self.image_end]

    def segments(self, ids: Sequence[int]) -> list[Segment]:
        """The segments of a row: runs of words, and images with the marks around their placeholders."""
        found: list[Segment] = []
        begin = place = 0
        while place < len(ids):
            if ids[place] != self.visual:
                place += 1
                continue
            end = place
            while end < len(ids) and ids[end] == self.visual:
                end += 1
            if place - 1 > begin:
                found.append(Segment(Kind.WORDS, place - 1 - begin))
            found.append(Segment(Kind.VISION, end - place + 2))
            begin = place = end + 1
        if begin < len(ids):
            found.append(Segment(Kind.WORDS, len(ids) - begin))
        return found


class BagelLanguage(PackedLanguage):
    """Words, and images between them, through the text expert."""

    def __init__(self, bagel: Bagel, marks: MarkIds) -> None:
        self._bagel = bagel
        self._marks = marks

    def run(
        self,
        rows: list[Tensor],
        cache: TextCache,
        inputs: Mapping[str, Tensor],
        *,
        needs_all: bool,
        keeps_keys: bool,
    ) -> tuple[Outputs, Layout]:
        """See the base. inputs: `patches` [*, numbers] and `grids` int64 [images, 2] of all images in the order of the
        rows."""
        ids = torch.cat(rows)
        segments = [self._marks.segments(row.tolist()) if inputs else [Segment(Kind.WORDS, len(row))] for row in rows]
        layout = Layout.of(segments, ids.device, contexts=cache.prefixes, known=cache.known)
        places = torch.arange(len(ids), device=ids.device) if needs_all else layout.last_places
        visual = None
        if inputs:
            ids = ids[ids != self._marks.visual]
            grids = [(rows, columns) for rows, columns in inputs["grids"].tolist()]
            visual = self._bagel.visual_tokens(inputs["patches"], grids)
        out = self._bagel.language_model(
            ids, visual, None, layout, cache.known, logit_places=places, keeps_keys=keeps_keys
        )
        return out, layout
