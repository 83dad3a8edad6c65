"""This machine as a clock: single operators are timed, and a small program says what the host takes to start them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from statistics import mean

import torch

from unirl.app.environment import settle_on_cpu
from unirl.app.meters import gemm_rate, meter_of
from unirl.app.plan.small_program import small_step, small_step_s
from unirl.app.plan.stopwatch import Stopwatch
from unirl.rehearsal.kernels import kernels_of
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.operators import Call
from unirl.types.devices import PRETEND, is_accelerator

ROUNDS = 5
"""Times that the small program and its operators are measured in turn: the pace of a shared CPU changes within a
second, and what the host takes is their difference."""


class Here:
    """Clock of the device that this machine computes on, in a process that is settled as that of a run.

    Raises ConfigError for a device that is not there.
    """

    def __init__(self, device: str) -> None:
        settle_on_cpu(device)
        self._meter = meter_of(device)
        self.name = f"this machine ({self._meter.device.type})"
        self.is_asynchronous = is_accelerator(self._meter.device)
        program = _program(self._meter.device.type)
        launches = sum(times for call, times in program.items() if self.is_started(call))
        whole_s, operators_s = [], []
        for _ in range(1 if self.is_asynchronous else ROUNDS):
            whole_s.append(small_step_s(self._meter))
            self._watch = Stopwatch(self._meter)
            operators_s.append(sum(times * self.seconds(call) for call, times in program.items()))
        self.host_s = max(mean(whole_s) - mean(operators_s), 0.0) / launches

    @cached_property
    def peak_flops(self) -> float:
        """FLOP per second of float32 matrices, measured when a report needs it."""
        return gemm_rate(self._meter, torch.float32)

    def is_started(self, call: Call) -> bool:
        """Every call on a CPU, views and what runs on the host too; of an accelerator what it computes."""
        return not self.is_asynchronous or call.is_launched

    def seconds(self, call: Call, *, trains: bool = False) -> float:
        """What it took here."""
        return self._watch.seconds(call, trains=trains)

    def sent_s(self, num_bytes: float, num_ranks: int) -> float:
        """One process sends nothing."""
        del num_bytes, num_ranks
        return 0.0

    def remarks(self) -> Iterator[str]:
        """The operators that take nothing."""
        if self._watch.untimed:
            yield f"not timed, since this device lacks them: {', '.join(sorted(self._watch.untimed))}"


def _program(device_type: str) -> Counter[Call]:
    """Calls of `small_step`."""
    mode = Rehearsal()
    with mode, kernels_of(device_type):
        step = small_step(torch.device(PRETEND))
        step()
        mode.enter_phase("step")
        step()
    return mode.counts.operators["step"]
