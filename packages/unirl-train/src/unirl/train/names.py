"""Names of values that several policies or tracks have: `<whose>/<name>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

ValueT = TypeVar("ValueT")


def joined(parts: Mapping[str, Mapping[str, ValueT]]) -> dict[str, ValueT]:
    """One mapping of several: {"a": {"x": 1}, "b": {"x": 2}} becomes {"a/x": 1, "b/x": 2}."""
    return {f"{whose}/{name}": value for whose, own in parts.items() for name, value in own.items()}


def below(values: Mapping[str, ValueT], prefix: str) -> dict[str, ValueT]:
    """What stands under a prefix, without it: {"a/x": 1, "b/x": 2} below "a/" is {"x": 1}; all of it below ""."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
