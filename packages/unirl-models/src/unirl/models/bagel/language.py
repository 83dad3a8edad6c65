"""BAGEL's decoder as a language model: called as `unirl.models.ar` calls those of transformers.

Prompts may hold images: each stands as [begin, one placeholder a token of the vision tower, end].
Legend: B rows, T tokens of a row, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from unirl.models.bagel.layout import Kind, Layout, Segment
from unirl.models.bagel.model import Bagel
from unirl.models.causal_lm.tokenizer import require_words
from unirl.models.packed.language import LanguageOutput, TextCache, rows_of
from unirl.models.packing import Packing


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


class BagelLanguage:
    """Words, and images between them, through the text expert."""

    def __init__(self, bagel: Bagel, marks: MarkIds) -> None:
        self._bagel = bagel
        self._marks = marks

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TextCache | None = None,
        logits_to_keep: int = 0,
        patches: Tensor | None = None,
        grids: Tensor | None = None,
    ) -> LanguageOutput:
        """Logits [1, N, vocabulary] of packed rows, or [B, 1, vocabulary] of the last token of padded ones.

        input_ids: int64 [1, N] with `packing`, else [B, T] padded on the left as `attention_mask` [B, >= T] says in its
        last columns. position_ids: not read, positions follow from marks and cache.
        patches, grids: [*, numbers] and int64 [images, 2], of all images in the order of the rows.
        """
        del position_ids, logits_to_keep
        rows = rows_of(input_ids, packing, attention_mask)
        if patches is None:
            segments = [[Segment(Kind.WORDS, len(row))] for row in rows]
        else:
            segments = [self._marks.segments(row.tolist()) for row in rows]
        cache = past_key_values if use_cache else None
        known = None if cache is None else cache.known
        contexts = None if cache is None else cache.prefixes
        layout = Layout.of(segments, input_ids.device, contexts=contexts, known=known)
        ids = torch.cat(rows)
        visual = None
        if patches is not None and grids is not None:
            ids = ids[ids != self._marks.visual]
            visual = self._bagel.visual_tokens(patches, [(row, column) for row, column in grids.tolist()])
        is_packed = packing is not None
        out = self._bagel.language_model(
            ids,
            visual,
            None,
            layout,
            known,
            logit_places=torch.arange(len(layout.order), device=ids.device) if is_packed else layout.last_places,
            keeps_keys=cache is not None,
        )
        if cache is not None:
            cache.known = layout.extended(known, out.layers)
            cache.prefixes = cache.known.prefixes
        return LanguageOutput(out.logits if is_packed else out.logits.transpose(0, 1))
