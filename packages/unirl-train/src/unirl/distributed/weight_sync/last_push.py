"""Remembers the last push to an engine, so that the next push can omit what the engine has."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from unirl.types.weights import WeightSpec

Changed = Literal["all", "tensors"]
"""Which tensors of a model a push sends."""


class LastPush:
    """The last push to an engine, of any policy. Nothing is known between `begin` and `succeed`."""

    def __init__(self) -> None:
        self._specs: dict[str, WeightSpec] = {}
        self._version: int | None = None

    def begin(self) -> int | None:
        """Start a push. Returns the engine's version, or None if it is not known and everything must be sent."""
        base, self._version = self._version, None
        if base is None:
            self._specs.clear()
        return base

    def succeed(self, version: int) -> None:
        """Record that the engine has all tensors since `begin`, as this version."""
        self._version = version

    def changes(self, spec: WeightSpec, tensor: Tensor) -> Tensor | None:
        """The tensor if it must be sent, None if the engine has it."""
        has_it = self._specs.get(spec.name) == spec
        self._specs[spec.name] = spec
        return None if has_it else tensor
