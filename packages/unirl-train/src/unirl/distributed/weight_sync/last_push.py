"""What an engine was sent last, so that the next push can leave out what it has."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from unirl.types.weights import WeightSpec

Changed = Literal["all", "tensors"]
"""What of a model travels in a push."""


class LastPush:
    """The last push to an engine, of whatever policy. Nothing is known between `begin` and `succeed`."""

    def __init__(self) -> None:
        self._specs: dict[str, WeightSpec] = {}
        self._version: int | None = None

    def begin(self) -> int | None:
        """Start a push: the version that the engine has, or None where that is not known and all must be sent."""
        base, self._version = self._version, None
        if base is None:
            self._specs.clear()
        return base

    def succeed(self, version: int) -> None:
        """The engine has what was asked for since `begin`, as this version."""
        self._version = version

    def changes(self, spec: WeightSpec, tensor: Tensor) -> Tensor | None:
        """What of a tensor must be sent: itself, or None where the engine has it."""
        has_it = self._specs.get(spec.name) == spec
        self._specs[spec.name] = spec
        return None if has_it else tensor
