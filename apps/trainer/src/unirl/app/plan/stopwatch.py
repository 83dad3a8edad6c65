"""Times single operators on this machine, with tensors of the shapes that a rehearsal noted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from unirl.app.meters import Meter
from unirl.rehearsal.operators import Call, TensorShape
from unirl.types.devices import has_values

FEWEST, MOST = 3, 50
"""Timed runs of an operator."""
CACHED_BYTES, KEPT_BYTES = 32 << 20, 64 << 20
"""Arguments are as many copies, used in turn: weights come back after the other layers, and where activations stay for
a backward pass, those come back after all that came in between."""
LEAST_S = 0.002
"""Seconds after which an operator was timed long enough."""

Value = Any  # Any: arguments of operators


class Stopwatch:
    """Seconds of calls on the device of a meter, each measured once per way of use."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._seconds: dict[tuple[Call, bool], float] = {}
        self._noise = torch.empty(0, device=meter.device)
        self.untimed = set[str]()
        """Operators that this machine lacks; they take nothing."""
        self._measuring_s = self._mean_s([lambda: None])
        """Seconds that it takes to measure nothing."""

    def seconds(self, call: Call, *, trains: bool) -> float:
        """Mean seconds of a call. trains: activations stay for a backward pass."""
        if (call, trains) not in self._seconds:
            measured = 0.0 if call.is_free else self._measured(call, KEPT_BYTES if trains else CACHED_BYTES)
            self._seconds[call, trains] = measured
        return self._seconds[call, trains]

    def _measured(self, call: Call, num_bytes: int) -> float:
        several = [
            tree_unflatten([self._filled(value) for value in call.arguments], call.spec)
            for _ in range(1 + min(MOST, num_bytes // max(call.num_bytes, 1)))
        ]
        try:
            with torch.no_grad():
                mean_s = self._mean_s([partial(call.func, *args, **kwargs) for args, kwargs in several])
        except (NotImplementedError, RuntimeError, TypeError, IndexError):  # a kernel that this device lacks
            self.untimed.add(call.name)
            return 0.0
        return max(mean_s - self._measuring_s, 0.0)

    def _filled(self, value: Value) -> Value:
        device = self._meter.device
        if isinstance(value, torch.device):
            return value if has_values(value) else device
        if not isinstance(value, TensorShape):
            return value
        made = torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=device)
        whole = made.as_strided((_num_stored(value),), (1,))
        if value.dtype.is_floating_point:
            whole.copy_(self._noise_of(len(whole)))
        else:
            whole.zero_()  # indices that are always there
        return made

    def _noise_of(self, num: int) -> Tensor:
        """The first numbers of one noise: to draw them for each argument takes longer than what is timed."""
        if num > len(self._noise):
            generator = torch.Generator(self._meter.device).manual_seed(0)
            self._noise = torch.randn(2 * num, generator=generator, device=generator.device)
        return self._noise[:num]

    def _mean_s(self, runs: Sequence[Callable[[], object]]) -> float:
        """As within a program: arguments are not in the nearest cache, and results, which stay for a while, take memory
        that the process has not touched yet."""
        found: list[float] = []
        kept: list[object] = [runs[0]()]
        for run in itertools.islice(itertools.cycle(runs), 1, None):
            with self._meter.measuring() as spent:
                kept.append(run())
            found.append(spent.seconds)
            if len(found) >= MOST or (len(found) >= FEWEST and sum(found) >= LEAST_S):
                break
        return statistics.mean(found)


def _num_stored(shape: TensorShape) -> int:
    """Numbers between the first and the last element."""
    if 0 in shape.size:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
