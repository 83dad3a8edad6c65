"""The nearest known names, for messages about unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A sentence with the nearest known names, or with some of them if none is near. Empty if there are none."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(names[:16])}{', ...' if len(names) > 16 else ''}." if names else ""
