"""Seconds, memory and matrix products of the device that computes, as `trainer bench` reports them."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from unirl.types.device_kinds import kind_of
from unirl.types.devices import is_accelerator

Shape = tuple[int, int, int]


@dataclass
class Spent:
    """What some work took on the device; complete after the work."""

    seconds: float = 0.0
    peak_bytes: int | None = None
    """Most memory that was allocated on the device at once; None where the device is the CPU."""


class Meter(Protocol):
    """Measures work on one kind of device."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        ...

    @property
    def gemm_shapes(self) -> Sequence[Shape]:
        """(m, k, n) tried for the device's rate; the best one counts, so that a fraction of it is never flattered."""
        ...

    @property
    def gemm_flops(self) -> float:
        """FLOP that one measurement of the rate takes, many times the cost of starting it."""
        ...

    def measuring(self) -> AbstractContextManager[Spent]:
        """Around some work; waits at the end until the device has done it."""
        ...


class CPUMeter:
    """CPU seconds of this process over all its threads: other work on the machine hardly changes them."""

    device = torch.device("cpu")
    gemm_shapes = (
        (2048, 2048, 2048),
        (1024, 1024, 1024),
        (4608, 384, 96),
        (3648, 512, 128),
        (8192, 512, 512),
    )
    gemm_flops = 2e9

    @contextmanager
    def measuring(self) -> Generator[Spent]:
        spent = Spent()
        started = time.process_time()
        yield spent
        spent.seconds = time.process_time() - started


class AcceleratorMeter:
    """Seconds between two events on the current stream, so gaps in which the device waits for the host count."""

    gemm_shapes = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 4096))
    gemm_flops = 1e13

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def measuring(self) -> Generator[Spent]:
        """See `Meter`. The peak is of PyTorch's allocator and counts what was allocated before; None where the device
        does not tell."""
        spent = Spent()
        with torch.accelerator.device_index(self.device.index):
            # torch.accelerator is the pretend device where one is registered.
            counter = torch.get_device_module(self.device) if kind_of(self.device.type).counts_memory else None
            if counter is not None:
                counter.reset_peak_memory_stats()
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            begin.record()
            yield spent
            end.record()
            end.synchronize()
            spent.seconds = begin.elapsed_time(end) / 1e3
            spent.peak_bytes = None if counter is None else counter.max_memory_allocated()


def meter_of(device: str) -> Meter:
    """The meter of a device as recipes name it."""
    place = torch.device(device)
    return AcceleratorMeter(place) if is_accelerator(place) else CPUMeter()


def gemm_rate(meter: Meter, dtype: torch.dtype, repeats: int = 5) -> float:
    """Best matrix-multiplication rate of the device in FLOP per second of its meter."""
    best = 0.0
    generator = torch.Generator().manual_seed(0)
    for m, k, n in meter.gemm_shapes:
        left, right = (torch.randn(size, generator=generator).to(meter.device, dtype) for size in ((m, k), (k, n)))
        flops = 2 * m * k * n
        inner = max(1, int(meter.gemm_flops / flops))
        for _ in range(repeats):
            with meter.measuring() as spent:
                for _ in range(inner):
                    left @ right
            if spent.seconds > 0:
                best = max(best, flops * inner / spent.seconds)
    return best
