"""How many bytes of tensors some work holds at once, counted operator by operator.

On the meta device nothing is computed, so that a model of true size is counted in seconds on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts the storages that operators make while this is entered: live ones, and the most at once.

    What was there before (weights, inputs) is left out, and so is what an operator needs inside (workspaces).
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Bytes of the storages alive now."""
        self.peak_bytes = 0
        """Largest `num_bytes` so far."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # Any: an operator's values
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made."""
        del types
        made = func(*args, **(kwargs or {}))
        found = {key: storage for key, storage in _storages(made).items() if key not in self._known}
        if found:
            given = _storages((args, kwargs))
            for key, storage in found.items():
                if key not in given:
                    self._count(key, storage)
        return made

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._known.add(key)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.num_bytes -= num_bytes


def _storages(values: object) -> dict[int, torch.UntypedStorage]:
    """Storages of the tensors among an operator's values, by identity."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in _tensors(values))}


def _tensors(values: object) -> Iterator[Tensor]:
    """By hand: an operator takes no deeper trees than sequences of tensors, and a model calls a hundred thousand."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
