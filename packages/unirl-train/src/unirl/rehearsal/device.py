"""The pretend device: registered with torch once per process, so that its name is a device like any other."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from unirl.rehearsal.kernels import register_kernels
from unirl.types.devices import PRETEND

CAPABILITY = (9, 0)
"""CUDA capability that libraries are told of: that of an H100."""


class _Event:
    """Everything is done as soon as it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:  # Any: options of CUDA's events
        return

    def record(self, stream: object = None) -> None:
        return

    def wait(self, stream: object = None) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        del other
        return 0.0


class _Stream:
    """The only stream."""

    def __init__(self, *_: Any, **__: Any) -> None:  # Any: options of CUDA's streams
        return

    @property
    def device(self) -> torch.device:
        """The only device."""
        return torch.device(PRETEND, 0)

    def wait_stream(self, other: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class _Backend(_DummyBackendModule):
    """What torch, FSDP and model libraries ask the module of a device."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        super().__init__()
        self._stream = _Stream()

    def current_stream(self, device: object = None) -> _Stream:
        return self._stream

    def default_stream(self, device: object = None) -> _Stream:
        return self._stream

    def set_stream(self, stream: object) -> None:
        return

    @contextmanager
    def stream(self, stream: object) -> Generator[None]:
        yield

    @contextmanager
    def device(self, device: object) -> Generator[None]:
        yield

    def synchronize(self, device: object = None) -> None:
        return

    def set_device(self, device: object) -> None:
        return

    def empty_cache(self) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        return

    def manual_seed_all(self, seed: int) -> None:
        return

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        return

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return CAPABILITY

    def memory_allocated(self, device: object = None) -> int:
        return 0


@cache
def register_device() -> None:
    """Make `PRETEND` a device of this process, with CUDA's autocast and attention. It stays one until the process
    ends."""
    _setup_privateuseone_for_python_backend(PRETEND, backend_module=_Backend())
    register_kernels()


def join_group(world_size: int) -> None:
    """Form a process group of which only rank 0 exists: collectives return at once what this rank gave."""
    register_device()
    capable = dist.Backend.backend_capability.setdefault("fake", [])
    if PRETEND not in capable:
        capable.append(PRETEND)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
