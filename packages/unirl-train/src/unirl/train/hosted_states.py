"""Moments of an optimizer that rest in host memory, and visit the device while their parameters are stepped.

A step takes some parameters at a time: while it computes, the moments of the next ones arrive and those of the ones
before leave, on separate streams. Values are those of the optimizer alone, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.train import host_memory
from unirl.train.optimizer_base import SteppedOptimizer
from unirl.train.shards import local_part, with_local
from unirl.types.devices import is_accelerator
from unirl.types.errors import ConfigError
from unirl.types.training import OptimizerConfig

VISIT_BYTES = 1 << 27
"""Moments that are brought at a time, or those of one parameter. The device holds up to three times as many: those
that are computed with, that arrive and that leave."""
STEP = "step"
"""The count of steps, which stays where the optimizer keeps it."""

Value = Any  # Any: streams and events of any device, options of a group


def check_offload(config: OptimizerConfig, device: torch.device, *, keeps_host: bool) -> None:
    """Raise ConfigError if offloading moves nothing. keeps_host: whether states are in host memory already."""
    if config.offload and not is_accelerator(device):
        raise ConfigError(f"optimizer.offload does nothing on device {device}. Set it to false.")
    if config.offload and keeps_host:
        raise ConfigError("optimizer.offload does nothing with fsdp.cpu_offload. Set one of them to false.")


def hosted(state: Tensor) -> Tensor:
    """The state in host memory: a DTensor with the sharding of the given one, or a plain tensor."""
    local = local_part(state)
    return with_local(state, host_memory.host_memory(local).copy_(local))


@dataclass(eq=False)
class _Visit:
    """Parameters that are stepped together."""

    group: dict[str, Value]
    parameters: list[nn.Parameter]
    states: dict[nn.Parameter, dict[str, Tensor]]
    """On the device."""
    arrived: Value = None
    left: Value = None
    """Events after the copies; None where there are no streams."""


class HostedOptimizer(SteppedOptimizer):
    """An optimizer whose states, but for the counts of steps, are `hosted`. Implements the interface of the one inside.

    inner: with its states in place. It is called with some of its parameters, and must give each the same step then.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self._streams: tuple[Value, Value] | None = None

    def _step(self) -> None:
        coming, leaving = self._visits(), deque[_Visit]()
        now = self._arriving(coming)
        while now is not None:
            while len(leaving) > 1:
                self._end(leaving.popleft())
            after = self._arriving(coming)
            self._update(now)
            self._leave(now)
            leaving.append(now)
            now = after
        for each in leaving:
            self._end(each)  # what reads states after the step finds them

    def _visits(self) -> Iterator[_Visit]:
        for group in self.param_groups:
            parameters, size = list[nn.Parameter](), 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = sum(local_part(state).nbytes for name, state in self.state[parameter].items() if name != STEP)
                if parameters and size + own > VISIT_BYTES:
                    yield _Visit(group, parameters, {})
                    parameters, size = [], 0
                parameters.append(parameter)
                size += own
            if parameters:
                yield _Visit(group, parameters, {})

    def _arriving(self, coming: Iterator[_Visit]) -> _Visit | None:
        """The next visit, whose states begin to arrive; None after the last."""
        visit = next(coming, None)
        if visit is None:
            return None
        device = local_part(visit.parameters[0]).device
        for parameter in visit.parameters:
            visit.states[parameter] = {
                name: state
                if name == STEP
                else with_local(state, torch.empty_like(local_part(state), device=device, pin_memory=False))
                for name, state in self.state[parameter].items()
            }
        with self._streaming(device, 0) as stream:
            for here, there in self._pairs(visit):
                here.copy_(there, non_blocking=True)
            visit.arrived = None if stream is None else stream.record_event()
        return visit

    def _update(self, visit: _Visit) -> None:
        """Step the parameters of a visit by the optimizer inside, which sees no others."""
        if visit.arrived is not None:
            torch.accelerator.current_stream().wait_event(visit.arrived)
        inner, states = self._inner, self._inner.state
        inner.param_groups, inner.state = [{**visit.group, "params": visit.parameters}], visit.states  # ty: ignore[invalid-assignment]: of the same kind
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = self.param_groups, states

    def _leave(self, visit: _Visit) -> None:
        """Begin to copy the states back."""
        with self._streaming(local_part(visit.parameters[0]).device, 1) as stream:
            for here, there in self._pairs(visit):
                there.copy_(here, non_blocking=True)
            visit.left = None if stream is None else stream.record_event()

    def _end(self, visit: _Visit) -> None:
        """Wait until they have left, and free the device's."""
        if visit.left is not None:
            visit.left.synchronize()
        visit.states.clear()

    def _pairs(self, visit: _Visit) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each state, on the device and on the host."""
        for parameter, states in visit.states.items():
            for name, state in states.items():
                if name != STEP:
                    yield local_part(state), local_part(self.state[parameter][name])

    @contextmanager
    def _streaming(self, device: torch.device, place: int) -> Generator[Value]:
        """Within it copies run on a separate stream, of those that arrive or those that leave, after all that was
        computed before; gives the stream, or None where there is none."""
        if not host_memory.has_streams(device):
            yield None
            return
        module = torch.get_device_module(device)
        if self._streams is None:
            self._streams = module.Stream(device), module.Stream(device)
        stream = self._streams[place]
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            yield stream
