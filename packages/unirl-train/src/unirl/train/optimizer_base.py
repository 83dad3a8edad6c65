"""What optimizers written here have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import overload

import torch


class SteppedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step takes torch's closure. A subclass says what a step does."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient. Returns the loss that `closure`, called before, computes."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._step()
        return loss

    @abstractmethod
    def _step(self) -> None:
        """Change the parameters that have a gradient. Gradients are off."""
