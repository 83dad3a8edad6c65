"""This machine as a clock: single operators are timed, and a small program says what the host takes to start them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unirl.app.meters import Meter, gemm_rate, meter_of
from unirl.app.plan.small_program import small_step, small_step_s
from unirl.app.plan.stopwatch import Stopwatch
from unirl.rehearsal.kernels import kernels_of
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.operators import Call
from unirl.types.devices import PRETEND, is_accelerator


class Here:
    """Clock of the device that this machine computes on.

    Raises ConfigError for a device that is not there.
    """

    def __init__(self, device: str) -> None:
        self._meter = meter_of(device)
        self._watch = Stopwatch(self._meter)
        self.name = f"this machine ({self._meter.device.type})"
        self.is_asynchronous = is_accelerator(self._meter.device)
        self.peak_flops = gemm_rate(self._meter, torch.float32)
        program = _program(self._meter)
        launches = sum(times for call, times in program.operators.items() if self.is_started(call))
        operators_s = sum(times * self.seconds(call) for call, times in program.operators.items())
        self.host_s = max(program.measured_s - operators_s, 0.0) / launches

    def is_started(self, call: Call) -> bool:
        """Every call on a CPU, views and what runs on the host too; of an accelerator what it computes."""
        return not self.is_asynchronous or call.is_launched

    def seconds(self, call: Call) -> float:
        """What it took here."""
        return self._watch.seconds(call)

    def sent_s(self, num_bytes: float, num_ranks: int) -> float:
        """One process sends nothing."""
        del num_bytes, num_ranks
        return 0.0

    def remarks(self) -> Iterator[str]:
        """The operators that take nothing."""
        if self._watch.untimed:
            yield f"not timed, since this device lacks them: {', '.join(sorted(self._watch.untimed))}"


@dataclass(frozen=True)
class _Program:
    operators: Counter[Call]
    measured_s: float


def _program(meter: Meter) -> _Program:
    """Forward and backward of a few layers, counted and measured."""
    mode = Rehearsal()
    with mode, kernels_of(meter.device.type):
        step = small_step(torch.device(PRETEND))
        step()
        mode.enter_phase("step")
        step()
    return _Program(mode.counts.operators["step"], small_step_s(meter))
