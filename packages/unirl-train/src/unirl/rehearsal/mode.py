"""The mode that a rehearsal runs in: host tensors are real and compute, tensors of the pretend device are fake.

So seeds, noise levels, prompts, indices, advantages and metrics are those of a real run, and only what the device would
hold has no values. Small tensors that are made of the host's keep their values on the device too, so that code that
decides by them goes the way of a real run. What else comes back from the device is zeros, and a boolean is True; every
read is recorded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed.fsdp  # defines the operators torch.ops.fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

import unirl
from unirl.rehearsal.device import register_device
from unirl.rehearsal.ledger import Ledger
from unirl.rehearsal.operators import COLLECTIVES, Call, Calls, total_flops
from unirl.rehearsal.patches import TorchPatches
from unirl.types.devices import PRETEND, has_values

aten = torch.ops.aten
PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer, FakeTensor})
"""Tensor classes that the mode handles; others (DTensor) unwrap themselves and come back with these."""
SMALL_BYTES = 1 << 20
"""A larger tensor that leaves the device shares one zero in host memory."""
MASKS = (torch.bool, torch.uint8)
MOST_VALUES, MOST_PLACES = 1 << 16, 1 << 20
"""Elements of a tensor of floating point, and of whole numbers or truth values, up to which its values are kept. Masks
of several long answers are large; so are weights, whose values say nothing."""
RANDOM = frozenset(
    getattr(packet, overload)
    for packet in (aten.randn, aten.rand, aten.normal_, aten.uniform_, aten.randint, aten.empty, aten.empty_strided)
    for overload in packet.overloads()
)
"""Operators whose results have no values that mean anything here."""
VIEWS = frozenset({aten.view.default, aten.split.Tensor, aten.split_with_sizes.default})
"""Views that FSDP makes of every parameter at every gathering, which took a third of a sharded model's rehearsal. Their
shapes come from the kernel alone, without the fake mode's rules for all operators."""
COPIES = frozenset(
    {torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.fsdp.chunk_cat.default, aten._foreach_copy_.default}
)
"""What copies into tensors that are there: no shape comes of it."""
HERE = str(Path(__file__).parent)

Value = Any  # Any: arguments and results of operators


@dataclass
class Counts:
    """What was computed, sent and read, by phase."""

    operators: dict[str, Counter[Call]] = field(default_factory=dict)
    """Calls on the device."""
    collectives: dict[str, Counter[str]] = field(default_factory=dict)
    """Bytes that each kind of collective gives or makes."""
    reads: Counter[str] = field(default_factory=Counter)
    """How often values of the device were read, by place in the code and not by phase."""

    @property
    def flops(self) -> dict[str, float]:
        """Floating-point operations by phase."""
        return {phase: total_flops(operators) for phase, operators in self.operators.items()}


class Rehearsal(TorchDispatchMode):
    """Enter it around everything that touches the pretend device. Not re-entrant."""

    def __init__(self) -> None:
        super().__init__()
        register_device()
        self.ledger = Ledger()
        self.counts = Counts()
        """Since the beginning, or since they were last replaced."""
        self.phase = "start"
        self.num_run = 0
        """Calls on the device that ran here; `counts` has those that were repeated too."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Values of small tensors that were made of tensors of the host."""
        self._calls = Calls()
        self._patches = TorchPatches(self.ledger)

    def enter_phase(self, name: str) -> None:
        """Count as this phase's from now on."""
        self.phase = name
        self.ledger.enter_phase(name)

    def collectives_of_phase(self) -> Counter[str]:
        """Bytes of this phase by kind, to add to."""
        return self.counts.collectives.setdefault(self.phase, Counter())

    def operators_of_phase(self) -> Counter[Call]:
        """Calls of this phase, to add to."""
        return self.counts.operators.setdefault(self.phase, Counter())

    def known_values(self, tensor: Tensor) -> Tensor | None:
        """The values of a small tensor of the device, which this does not count as a read; None if it has none."""
        return self._values.get(tensor)

    # What torch calls ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Value,
        types: Sequence[type],
        args: tuple[Value, ...] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        """One operator."""
        named = dict(kwargs or {})
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        flat, spec = tree_flatten((args, named))
        fakes = [value for value in flat if isinstance(value, FakeTensor)]
        if fakes and fakes[0].fake_mode is not self._fake:
            return func(*args, **named)  # of DTensor, which asks for the shapes of whole tensors
        if not fakes and not any(isinstance(value, torch.device) and not has_values(value) for value in flat):
            out = func(*args, **named)
            self.operators_of_phase()[self._calls.of(func, args, named, flat, spec, out, is_on_host=True)] += 1
            return out
        read = self._read(func, args, named)
        if read is not None:
            return read[0]
        given = flat, spec
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):
            self._record("a mask")
            args = (args[0], [each for index in args[1] for each in self._all_places(index)])
            flat, spec = tree_flatten((args, named))
        out = self._faked(func, args, named, flat, spec)
        self._count(func, args, named, flat, spec, out)
        self._shadow(func, *given, out)  # by masks as they were
        return out

    def _faked(
        self, func: Value, args: tuple[Value, ...], named: dict[str, Value], flat: list[Value], spec: TreeSpec
    ) -> Value:
        """The operator on shapes alone. flat, spec: the arguments as a tree."""
        if func is aten.nonzero.default:
            num = self._num_true(args[0])
            with self._fake:
                return torch.empty(num, args[0].ndim, dtype=torch.int64, device=PRETEND)
        if func is aten.bincount.default:
            return self._even_counts(*args, **named)
        if func in COPIES:
            return None
        if func in VIEWS:
            return self._viewed(func, args, named)
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            _, gathered, _, num_own, rank = args
            own = self._viewed(aten.slice.Tensor, (gathered, 0, num_own * rank, num_own * (rank + 1)), {})
            return own, gathered
        with self._fake:
            if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
                source = args[0]  # comes to the device
                dtype = named.get("dtype") or source.dtype
                # An expanded one, such as the zeros that stand for what left the device, comes as a whole.
                if 0 in source.stride():
                    return torch.empty(source.size(), dtype=dtype, device=PRETEND)
                return torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=PRETEND)
            if any(isinstance(value, Tensor) and not isinstance(value, FakeTensor) for value in flat):
                args, named = tree_unflatten([_stand_in(value) for value in flat], spec)
            try:
                return func(*args, **named)
            except DynamicOutputShapeException:  # how much comes out depends on values
                if not self._has_values(flat):
                    raise
        made = self._computed(func, flat, spec)
        shapes = [(each.size(), each.dtype) for each in (made if isinstance(made, tuple) else (made,))]
        with self._fake:
            outs = tuple(torch.empty(size, dtype=dtype, device=PRETEND) for size, dtype in shapes)
        return outs if isinstance(made, tuple) else outs[0]

    def _viewed(self, func: Value, args: tuple[Value, ...], named: dict[str, Value]) -> Value:
        """A view of the first argument, or several."""
        with in_kernel_invocation_manager(self._fake):
            made = func(*args, **named)
        if isinstance(made, Tensor):
            return FakeTensor(self._fake, made, args[0].device)
        return [FakeTensor(self._fake, each, args[0].device) for each in made]

    def _even_counts(self, tokens: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """How often each number occurs: all equally often, as the tokens of a router that is balanced."""
        num, rest = divmod(tokens.numel(), max(minlength, 1))
        with self._fake:
            made = torch.empty(minlength, dtype=torch.int64, device=PRETEND)
        self._values[made] = torch.tensor([num + (place < rest) for place in range(minlength)])
        return made

    # Values of the device --------------------------------------------------------------------------------------------

    def _read(self, func: Value, args: tuple[Value, ...], named: dict[str, Value]) -> tuple[Value] | None:
        """What an operator gives that needs values, in a tuple; None if it needs none."""
        first: Value = args[0] if args else None
        if func is aten._local_scalar_dense.default:
            self._record("a number")
            if (values := self._values.get(first)) is not None:
                return (values.item(),)
            return (True if first.dtype == torch.bool else 0.0 if first.is_floating_point() else 0,)
        if func is aten._to_copy.default and isinstance(first, FakeTensor) and _is_host(named.get("device")):
            if self._patches.is_moving:  # a module leaves the device: it stays where it is, and counts as the host's
                self.ledger.leave(first)
                return (first,)
            self._record("a tensor")
            if (values := self._values.get(first)) is not None:
                return (values.to(named.get("dtype") or first.dtype, copy=True),)
            return (_zeros(first, named.get("dtype") or first.dtype),)
        if func is aten.copy_.default and not isinstance(first, FakeTensor):
            self._record("a tensor")
            return (first.fill_(0),)
        if func is aten.nonzero.default:
            self._record("the places of a mask")
        return None

    def _all_places(self, index: Value) -> list[Value]:
        """The places of a mask, along each of its dimensions; another index as it is."""
        if not _is_mask(index):
            return [index]
        num = self._num_true(index)
        with self._fake:
            return [torch.empty(num, dtype=torch.int64, device=index.device) for _ in range(index.ndim)]

    def _num_true(self, mask: Tensor) -> int:
        """What a mask keeps: without values all that it could, the largest that the result can be."""
        values = self._values.get(mask)
        return mask.numel() if values is None else int(values.count_nonzero())

    def _record(self, what: str) -> None:
        """Note the nearest line of the project that reads, or of another library."""
        frame, found = sys._getframe(2), None
        while frame is not None:
            name = frame.f_code.co_filename
            if (place := own_place(name, frame.f_lineno)) is not None:
                found = place
                break
            if found is None and "/torch/" not in name and not name.startswith(HERE):
                found = f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
            frame = frame.f_back
        self.counts.reads[f"{what} at {found}"] += 1

    def _shadow(self, func: Value, flat: list[Value], spec: TreeSpec, out: Value) -> None:
        """Give a small result its values, if all that it is made of has values: noise levels, lengths, masks.

        Code that decides by them then takes the branches of a real run.
        """
        outs = out if isinstance(out, tuple | list) else (out,)
        if func is torch.ops.c10d.alltoall_base_.default and flat[0].shape == flat[1].shape:
            # Counts of a router that is balanced: the other ranks send what this one does.
            if (values := self._values.get(flat[1])) is not None:
                self._values[flat[0]] = values.clone()
            return
        if func in RANDOM or not all(isinstance(each, FakeTensor) and each.numel() <= _most(each) for each in outs):
            return
        if not self._has_values(flat):
            if func._schema.is_mutable:  # what it wrote has no values any more
                for value in flat:
                    if isinstance(value, Tensor):
                        self._values.pop(value, None)
            return
        try:
            made = self._computed(func, flat, spec)
        except NotImplementedError:  # a kernel that only devices have
            return
        # An operator in place gives what it was given: its values changed with it.
        for each, values in zip(outs, made if isinstance(out, tuple | list) else (made,), strict=True):
            self._values[each] = values

    def _has_values(self, flat: list[Value]) -> bool:
        """True if all tensors among arguments have values."""
        return all(self._values.get(value) is not None for value in flat if isinstance(value, FakeTensor))

    def _computed(self, func: Value, flat: list[Value], spec: TreeSpec) -> Value:
        """An operator of the values of its arguments, in host memory."""
        args, named = tree_unflatten([self._with_values(value) for value in flat], spec)
        return func(*args, **named)

    def _with_values(self, value: Value) -> Value:
        if isinstance(value, FakeTensor):
            return self._values[value]
        return torch.device("cpu") if isinstance(value, torch.device) and not has_values(value) else value

    # Counting --------------------------------------------------------------------------------------------------------

    def _count(
        self,
        func: Value,
        args: tuple[Value, ...],
        named: dict[str, Value],
        flat: list[Value],
        spec: TreeSpec,
        out: Value,
    ) -> None:
        made = [value for value in tree_leaves(out) if isinstance(value, FakeTensor)]
        self.ledger.made(value for value in made if not has_values(value.device))
        if func.namespace == "prim":  # a question about a tensor
            return
        self.num_run += 1
        self.operators_of_phase()[self._calls.of(func, args, named, flat, spec, out)] += 1
        if func.namespace in COLLECTIVES:
            tensors = [*made, *(value for value in flat if isinstance(value, Tensor))]
            largest = max((value.numel() * value.element_size() for value in tensors), default=0)
            name = func._overloadpacket._qualified_op_name.split("::")[1].strip("_").removesuffix("_base")
            self.collectives_of_phase()[name] += largest

    def __enter__(self) -> Self:
        self._patches.enter()
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self._patches.exit()
        super().__exit__(exc_type, exc_val, exc_tb)


def own_place(file: str, line: int | None) -> str | None:
    """A line of the project, as a rehearsal names it; None for a library's, and for those of the rehearsal itself."""
    if file.startswith(HERE):
        return None
    own = (f"{folder}/" for folder in unirl.__path__)  # of the packages, wherever the checkout lies
    return next((f"{file.removeprefix(folder)}:{line}" for folder in own if file.startswith(folder)), None)


def _stand_in(value: Value) -> Value:
    """A fresh tensor for a real one among fakes; the fake mode's converter would keep it for good."""
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return value


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    if like.numel() * dtype.itemsize <= SMALL_BYTES:
        return torch.zeros(like.shape, dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(like.shape)


def _is_host(device: torch.device | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _most(tensor: Tensor) -> int:
    return MOST_VALUES if tensor.is_floating_point() or tensor.is_complex() else MOST_PLACES


def _is_mask(index: Value) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in MASKS
