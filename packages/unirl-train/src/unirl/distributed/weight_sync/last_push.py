"""Remembers the last push to an engine, so that the next push can omit what the engine has."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from unirl.train.host_memory import host_memory
from unirl.types.deltas import element_delta, put_delta
from unirl.types.weights import WeightSpec

Changed = Literal["all", "tensors", "elements"]
"""What a push sends of a model."""


class LastPush:
    """The last push to an engine, of any policy. Nothing is known between `begin` and `succeed`.

    keeps_elements: also keep the tensors, in host memory, to find the elements that change.
    """

    def __init__(self, *, keeps_elements: bool) -> None:
        self._keeps_elements = keeps_elements
        self._specs: dict[str, WeightSpec] = {}
        self._tensors: dict[str, Tensor] = {}
        self._version: int | None = None
        self._num_changed = self._num_elements = 0

    def begin(self) -> int | None:
        """Start a push. Returns the engine's version, or None if it is not known and everything must be sent."""
        base, self._version = self._version, None
        if base is None:
            self._specs.clear()
        self._num_changed = self._num_elements = 0
        return base

    def succeed(self, version: int) -> None:
        """Record that the engine has all tensors since `begin`, as this version."""
        self._version = version

    @property
    def changed_fraction(self) -> float:
        """Fraction of elements that differ from the previous push; 1 if that push is not known."""
        return self._num_changed / max(1, self._num_elements)

    def changes(self, spec: WeightSpec, tensor: Tensor) -> Tensor | None:
        """What must be sent of a tensor: the tensor, a delta, or None if the engine has it."""
        last = self._specs.get(spec.name)
        self._specs[spec.name] = spec
        self._num_elements += tensor.numel()
        if last == spec:
            return None
        if not self._keeps_elements:
            return tensor
        if last is None:
            self._num_changed += tensor.numel()
            self._keep(spec.name, tensor)
            return tensor
        num_changed, delta = element_delta(self._tensors[spec.name], tensor)
        self._num_changed += num_changed
        if delta is None:
            self._keep(spec.name, tensor)
            return tensor
        put_delta(self._tensors[spec.name], delta)
        return delta

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name not in self._tensors:
            self._tensors[name] = host_memory(tensor)
        self._tensors[name].copy_(tensor.detach())
