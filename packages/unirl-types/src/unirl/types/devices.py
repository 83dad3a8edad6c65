"""What code asks of a device, so that none is named elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

PRETEND = "pretend"
"""Device type of a rehearsal: its tensors have shapes, dtypes and a device, but no values, and nothing is computed."""


def is_accelerator(device: str | torch.device) -> bool:
    """True for a device with memory separate from the host's: a GPU, or the one that a rehearsal pretends to have."""
    return torch.device(device).type not in ("cpu", "meta")


def has_values(device: str | torch.device) -> bool:
    """False for the pretend device of a rehearsal, on which models are built and no weights are read."""
    return torch.device(device).type != PRETEND


def empty_cache(device: str | torch.device) -> None:
    """Return the memory that the device's allocator keeps without using it; nothing on a CPU."""
    if is_accelerator(device):
        torch.get_device_module(torch.device(device)).empty_cache()


_on_host: ContextVar[bool] = ContextVar("on_host", default=False)


def is_on_host() -> bool:
    """True if what the pretend device makes now stands for host memory."""
    return _on_host.get()


@contextmanager
def building_on(device: str | torch.device, *, of: str | torch.device) -> Generator[torch.device]:
    """The device to build a part of a model on, most of which is on `of`: `device`, but the pretend one in a rehearsal,
    where what is made stands for memory of the host if `device` is the host."""
    if has_values(of):
        yield torch.device(device)
        return
    token = _on_host.set(not is_accelerator(device))
    try:
        yield torch.device(of)
    finally:
        _on_host.reset(token)
