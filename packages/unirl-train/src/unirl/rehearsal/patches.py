"""What a rehearsal changes in torch itself: functions that no dispatch mode sees, or that refuse fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._device import _device_constructors

from unirl.rehearsal.ledger import Ledger
from unirl.types.devices import PRETEND

Value = Any  # Any: arguments and results of torch's functions


class TorchPatches:
    """The changes of one rehearsal, from `enter` to `exit`. ledger: is told of storages and modules that move."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._num_moving = 0
        self._undo: list[Callable[[], None]] = []

    @property
    def is_moving(self) -> bool:
        """True while a module goes to another device or dtype."""
        return self._num_moving > 0

    def enter(self) -> None:
        """Replace torch's functions by those of the rehearsal."""
        self._follow_storages()
        self._take_fakes()
        # torch.tensor(1, device=...) then makes a host tensor and moves it through the dispatcher.
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._undo.append(lambda: torch._C._set_only_lift_cpu_tensors(lifts))

    def exit(self) -> None:
        """Put torch's own functions back."""
        while self._undo:
            self._undo.pop()()

    def _follow_storages(self) -> None:
        """Tell the ledger what changes or moves without an operator."""
        resize, apply = torch.UntypedStorage.resize_, nn.Module._apply
        infer = ShardingPropagator._propagate_tensor_meta_non_cached
        ledger = self._ledger

        def resized(storage: torch.UntypedStorage, size: int) -> Value:
            result = resize(storage, size)
            ledger.resized(storage, size)
            return result

        def moved(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            with self._moving_modules():
                return apply(module, lambda tensor: self._moved(fn, tensor), recurse)

        def inferred(propagator: Value, *args: Value, **kwargs: Value) -> Value:
            with ledger.silent():  # runs each operator once on whole tensors
                return infer(propagator, *args, **kwargs)

        self._patch(torch.UntypedStorage, "resize_", resized)
        self._patch(nn.Module, "_apply", moved)
        self._patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", inferred)

    def _take_fakes(self) -> None:
        """Let functions take fake tensors that refuse them, or read them one number at a time."""
        swap, build, new_group = torch.utils.swap_tensors, torch.tensor, dist.new_group

        def swapped(one: Tensor, two: Tensor) -> None:
            # Parameters of a fake module have weak references, which torch refuses to swap.
            if isinstance(one, FakeTensor) and isinstance(two, FakeTensor):
                one.data = two.data
            else:
                swap(one, two)

        def joined(*args: Value, backend: str | None = None, **kwargs: Value) -> Value:
            del backend  # a group of gloo within a fake one ends the process
            return new_group(*args, **kwargs)

        def listed(tensor: Tensor) -> Value:
            return tensor.cpu().tolist()  # as torch does; a fake one reads each number

        def built(data: Value, *args: Value, **kwargs: Value) -> Tensor:
            # torch reads tensors within a list where no mode sees it.
            is_list = isinstance(data, list | tuple)
            return build([_number(each) for each in data] if is_list else data, *args, **kwargs)

        _device_constructors()  # keeps what it finds first, which must be torch's own functions
        module = torch.get_device_module(PRETEND)
        self._patch(torch.accelerator, "current_stream", module.current_stream)
        self._patch(dist, "new_group", joined)
        self._patch(FakeTensor, "tolist", listed)
        self._patch(torch, "tensor", built)
        self._patch(torch.utils, "swap_tensors", swapped)

    def _patch(self, owner: Value, name: str, value: Value) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _moved(self, fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        self._ledger.come_back(tensor)
        return fn(tensor)  # which says so if the tensor leaves, or stays away

    @contextmanager
    def _moving_modules(self) -> Generator[None]:
        self._num_moving += 1
        try:
            yield
        finally:
            self._num_moving -= 1


def _number(value: Value) -> Value:
    return value.tolist() if isinstance(value, FakeTensor) else value
