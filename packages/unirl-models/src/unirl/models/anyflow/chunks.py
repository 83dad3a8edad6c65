"""How a video is cut into chunks, and which tokens of a prefix see which. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Span = tuple[int, int, int]
"""First token and end of a chunk, whose tokens see all before the end; and how many keys of zeros they see besides."""
BLOCK = 128
"""Tokens that the stock pipeline's kernel takes at once: it fills a chunk up with zeros, and masks them in what it has
made before, but not in the chunk that it is making."""


def cut(partition: Sequence[int], num_frames: int) -> list[int]:
    """Latent frames of each chunk of a video of `num_frames`.

    partition: the checkpoint's own, which holds for a video of as many. Another has its first chunk, then as many of
    its largest as fit, and what is left.
    """
    if sum(partition) == num_frames:
        return list(partition)
    sizes = [min(partition[0], num_frames)]
    while (left := num_frames - sum(sizes)) > 0:
        sizes.append(min(max(partition), left))
    return sizes


def ranges(sizes: Sequence[int]) -> list[slice]:
    """Where the frames of each chunk lie."""
    return [slice(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True)
class Resolution:
    """How many tokens a latent frame has."""

    whole: int
    """In the chunk that is made and those just before it."""
    compressed: int
    """In earlier ones."""
    num_whole: int
    """How many chunks are whole, the one that is made included."""

    def spans(self, sizes: Sequence[int]) -> tuple[Span, ...]:
        """Those of a prefix of these chunks, of which the last is made."""
        first_whole = max(0, len(sizes) - self.num_whole)
        lengths = [size * (self.compressed if index < first_whole else self.whole) for index, size in enumerate(sizes)]
        spans = [(start, end, 0) for start, end in pairwise(accumulate(lengths, initial=0))]
        start, end, _ = spans[-1]
        return (*spans[:-1], (start, end, -(end - start) % BLOCK))
