"""Keys of recipes as one line each. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:  # Any: JSON values
    """(key with dots, value) of a recipe, or another tree of mappings. An empty mapping is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
