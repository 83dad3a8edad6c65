"""The nearest known names, for messages about unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.5
"""How alike names are, in [0, 1], of which one may stand for the other."""


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names nearest to `name`, the nearest first; none if none is near."""
    return difflib.get_close_matches(name, sorted(set(known)), n=limit, cutoff=CUTOFF)


def takes_out(name: str, value: object, usable: Iterable[str]) -> bool:
    """True if null takes out an argument that the class does not have: the class of a recipe that another one builds on
    had it. A name near one that the class has is a mistake."""
    return value is None and not nearest(name, usable)


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A sentence with the nearest known names, or with some of them if none is near. Empty if there are none."""
    names = sorted(set(known))
    near = nearest(name, names, limit)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(names[:16])}{', ...' if len(names) > 16 else ''}." if names else ""
