"""Frozen modules that rest in host memory and are on the model's device only while they are used."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unirl.types.devices import empty_cache


class Resting:
    """Where text encoders are that encode on `device` and rest in host memory.

    Their weights stay in host memory all the time, so that leaving the device copies nothing back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: list[tuple[Tensor, Tensor]] = []
        """Every weight that is on the device now, with its values in host memory."""
        self._depth = 0

    @contextmanager
    def visit(self) -> Generator[None]:
        """What `bring` moves within it leaves the device at the end of the outermost visit."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._send_back()

    def bring(self, modules: Iterable[nn.Module]) -> None:
        """Move the modules to the device, where they are not there yet. Call it within a `visit`."""
        if self._host:
            return
        for module in modules:
            for weight in (*module.parameters(), *module.buffers()):
                self._host.append((weight, weight.data))
                weight.data = weight.data.to(self._device, copy=True)

    def _send_back(self) -> None:
        was_there = bool(self._host)
        for weight, host in self._host:
            weight.data = host
        self._host.clear()
        if was_there:
            empty_cache(self._device)
