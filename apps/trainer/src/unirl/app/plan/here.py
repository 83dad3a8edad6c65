"""This machine as a clock: single operators are timed, and a small program says what the host takes to start them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unirl.app.meters import Meter, gemm_rate, meter_of
from unirl.app.plan.stopwatch import Stopwatch
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.operators import Call
from unirl.types.devices import PRETEND, is_accelerator

NUM_TOKENS = 4
"""Tokens for a model so small that its time is the host's: the Python of a model library, autograd and dispatch."""
REPEATS = 5


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
        launches = sum(times for call, times in program.operators.items() if not call.is_free and not call.is_on_host)
        operators_s = sum(times * self.seconds(call) for call, times in program.operators.items())
        self.host_s = max(program.measured_s - operators_s, 0.0) / launches

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
    with mode:
        step = _step(torch.device(PRETEND))
        step()
        mode.enter_phase("step")
        step()
    step = _step(meter.device)
    step()
    found: list[float] = []
    for _ in range(REPEATS):
        with meter.measuring() as spent:
            step()
        found.append(spent.seconds)
    return _Program(mode.counts.operators["step"], statistics.median(found))


def _step(device: torch.device) -> Callable[[], None]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    with device:
        model = Qwen3ForCausalLM(config)
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long)

    def run() -> None:
        model(tokens, use_cache=False).logits.square().mean().backward()

    return run
