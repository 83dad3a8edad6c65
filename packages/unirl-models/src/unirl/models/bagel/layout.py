"""Sequences of words and images, packed end to end: where each token stands.

What a token attends to: `unirl.models.packed.rows`; of its own segment words see what is before them, tokens of an
image all of it. All tokens of an image have one position, and the image counts as one.
Legend: N tokens of all rows, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.packed.rows import PackedRows, joined_ranges


class Kind(Enum):
    """What a segment holds."""

    WORDS = "words"
    VISION = "vision"
    """[begin of image, tokens of the vision tower, end of image]; the text expert reads all."""
    LATENTS = "latents"
    """[begin of image, latent tokens, end of image]; the generation expert reads the latent tokens."""


@dataclass(frozen=True)
class Segment:
    """A part of a row."""

    kind: Kind
    length: int
    """Tokens, the two marks around an image included."""

    @property
    def is_causal(self) -> bool:
        return self.kind is Kind.WORDS

    @property
    def num_positions(self) -> int:
        return self.length if self.kind is Kind.WORDS else 1


@dataclass(frozen=True, eq=False)
class Layout(PackedRows):
    """R rows of new segments after their contexts."""

    rows: tuple[tuple[Segment, ...], ...]

    @property
    def _segments(self) -> list[Segment]:
        return [segment for row in self.rows for segment in row]

    @staticmethod
    def positions_of(row: Sequence[Segment], start: int) -> Tensor:
        """int64, the position of each token of a row whose first one is `start`."""
        parts = []
        for segment in row:
            is_words = segment.kind is Kind.WORDS
            parts.append(
                torch.arange(start, start + segment.length) if is_words else torch.full((segment.length,), start)
            )
            start += segment.num_positions
        return torch.cat(parts)

    @cached_property
    def _num_inside(self) -> dict[Kind, int]:
        """Tokens that are no words, by what they are."""
        return {kind: sum(_inside(each) for each in self._segments if each.kind is kind) for kind in Kind}

    @property
    def num_latents(self) -> int:
        """Latent tokens of all rows."""
        return self._num_inside[Kind.LATENTS]

    @cached_property
    def order(self) -> Tensor:
        """int64 [N]: of each token its place in [words, tokens of the vision tower, latents].

        Each is counted in the order of the rows, the marks around an image as words.
        """
        num_words = sum(each.length for each in self._segments) - sum(self._num_inside.values())
        following = {Kind.WORDS: 0, Kind.VISION: num_words, Kind.LATENTS: num_words + self._num_inside[Kind.VISION]}

        def take(kind: Kind, count: int) -> range:
            start = following[kind]
            following[kind] += count
            return range(start, start + count)

        order: list[range] = []
        for segment in self._segments:
            if segment.kind is Kind.WORDS:
                order.append(take(Kind.WORDS, segment.length))
            else:
                order += [take(Kind.WORDS, 1), take(segment.kind, _inside(segment)), take(Kind.WORDS, 1)]
        return joined_ranges(order).to(self.positions.device)

    @cached_property
    def _stream_places(self) -> Tensor:
        """int64 [N], the inverse of `order`."""
        return self.order.argsort()

    def interleaved(self, *streams: Tensor) -> Tensor:
        """What the text expert read, and the generation expert where it did, in the order of the rows: [N, *]."""
        return (streams[0] if len(streams) == 1 else torch.cat(streams)).index_select(0, self.order)

    def streams(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `interleaved`."""
        parts = tokens.index_select(0, self._stream_places)
        return parts.split([len(parts) - self.num_latents, self.num_latents]) if self.num_latents else (parts,)


def _inside(segment: Segment) -> int:
    """Tokens of a segment that are no words."""
    return 0 if segment.kind is Kind.WORDS else segment.length - 2
