"""The sizes of images that HunyuanImage3 knows, each by its own word."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.errors import ConfigError

Size = tuple[int, int]
"""Height and width in pixels."""

PUBLISHED_BASE = 1024

BEYOND: tuple[Size, ...] = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
"""Sizes that follow the regular ones, at the published base."""

STEPS = 16
"""Into how many steps the base is cut."""


def sizes(base: int) -> tuple[Size, ...]:
    """Every size, in the order of its words: from the widest to the tallest, then `BEYOND`.

    One side grows from `base` by steps to twice of it while the other shrinks to half.
    """
    step = base // STEPS
    tall = [(base + number * step, max(base - number * step, base // 2)) for number in range(STEPS + 1)]
    wide = [(short, long) for long, short in tall[:0:-1]]
    beyond = ((height * base // PUBLISHED_BASE, width * base // PUBLISHED_BASE) for height, width in BEYOND)
    return (*wide, *tall, *beyond)


def nearest(height: int, width: int, known: Sequence[Size]) -> int:
    """The place of the size with the nearest ratio of the sides, the first of equal ones."""
    return min(range(len(known)), key=lambda place: abs(known[place][0] / known[place][1] - height / width))


def require_size(height: int, width: int, known: Sequence[Size], factor: int) -> int:
    """The place of a size. Raises ConfigError for one that is not known or does not divide, naming the nearest."""
    if (height, width) in known and height % factor == width % factor == 0:
        return known.index((height, width))
    usable = [size for size in known if size[0] % factor == size[1] % factor == 0]
    best = usable[nearest(height, width, usable)]
    raise ConfigError(
        f"HunyuanImage3 has no word for {height} x {width} pixels. Of the same shape it makes {best[0]} x {best[1]}: "
        f"set sampling.height: {best[0]} and sampling.width: {best[1]}."
    )
