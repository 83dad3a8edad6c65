"""Calls of operators as far as their cost depends on them: what a device computes, reads and writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_leaves

from unirl.train.flops import FORMULAS

aten = torch.ops.aten
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of operators that send; their bytes are counted by kind."""
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_reshape_alias"})
"""Operators that touch no memory, besides views."""
PICKING = frozenset({"embedding", "index", "gather", "index_select", "slice_scatter", "select_backward"})
"""Operators that read as much of their first argument as they write."""

Value = Any  # Any: arguments and results of operators


@dataclass(frozen=True)
class TensorShape:
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in memory: of an expanded dimension one element."""
        pairs = zip(self.size, self.stride, strict=True)
        num = 1
        for length, stride in pairs:
            num *= length if stride or not length else 1
        return num * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator. Calls that cost the same are one object."""

    func: OpOverload
    arguments: tuple[Value, ...]
    """Leaves of the arguments' tree, with `TensorShape`s; of numbers those of the first such call."""
    spec: TreeSpec
    flops: int
    num_bytes: int
    """Read and written."""
    dtype: torch.dtype | None
    """What it computes in: that of its first tensor."""
    is_on_host: bool = False
    """True if all its tensors are in host memory: its operations do not count."""

    @property
    def name(self) -> str:
        """As `aten.mm.default`."""
        return str(self.func)

    @property
    def is_free(self) -> bool:
        """True for a view and for memory that is not written: the host alone has work."""
        return self.num_bytes == 0 and self.flops == 0

    @property
    def is_launched(self) -> bool:
        """True if the device computes it."""
        return not self.is_free and not self.is_on_host


class Calls:
    """Finds the call of arguments."""

    def __init__(self) -> None:
        self._calls: dict[Value, Call] = {}

    def of(
        self,
        func: OpOverload,
        args: tuple[Value, ...],
        kwargs: Mapping[str, Value],
        flat: Sequence[Value],
        spec: TreeSpec,
        out: Value,
        *,
        is_on_host: bool = False,
    ) -> Call:
        """The call of an operator that gave `out`. flat, spec: its arguments as a tree."""
        if func.is_view or func.namespace in COLLECTIVES:
            key: Value = func
            found = self._calls.get(key)
            if found is None:
                found = self._calls[key] = Call(func, (), spec, 0, 0, None)
            return found
        described = tuple(_described(value) for value in flat)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:  # of numbers the kind is enough
            key = is_on_host, func, tuple(each if isinstance(each, TensorShape) else type(each) for each in described)
        else:
            key = is_on_host, func, str(spec), tuple(map(_hashable, described))
        found = self._calls.get(key)
        if found is None:
            flops = formula(*args, **kwargs, out_val=out) if formula is not None and not is_on_host else 0
            num_bytes = _num_bytes(func, args, kwargs, out)
            shapes = [each for each in described if isinstance(each, TensorShape)]
            dtype = shapes[0].dtype if shapes else None
            found = self._calls[key] = Call(func, described, spec, flops, num_bytes, dtype, is_on_host)
        return found


def _num_bytes(func: OpOverload, args: tuple[Value, ...], kwargs: Mapping[str, Value], out: Value) -> int:
    """Bytes that an operator reads and writes, each of its tensors once, those that it changes twice."""
    name = func._overloadpacket.__name__
    if name in UNWRITTEN:
        return 0
    returned = _bytes_of(out)
    if name in PICKING:
        return 2 * returned
    total, changes = 0, False
    arguments = func._schema.arguments
    values = itertools.chain(
        zip(arguments, args, strict=False), ((each, kwargs[each.name]) for each in arguments if each.name in kwargs)
    )
    for argument, value in values:
        size = _bytes_of(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        changes |= is_written
        total += 2 * size if is_written else size
    return total if changes else total + returned


def _bytes_of(value: Value) -> int:
    return sum(shape_of(leaf).num_bytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.size()), tensor.stride(), tensor.dtype)


def _described(value: Value) -> Value:
    return shape_of(value) if isinstance(value, Tensor) else value


def _hashable(value: Value) -> Value:
    return value if isinstance(value, int | float | str | TensorShape | torch.dtype | None) else type(value)


def total_flops(operators: Mapping[Call, float]) -> float:
    """Floating-point operations of all calls."""
    return sum(times * call.flops for call, times in operators.items())


def summed(several: Iterable[tuple[Mapping[Call, float], float]]) -> dict[Call, float]:
    """The calls of several, each so many times."""
    found: dict[Call, float] = {}
    for operators, scale in several:
        for call, times in operators.items():
            found[call] = found.get(call, 0.0) + times * scale
    return {call: times for call, times in found.items() if times}
