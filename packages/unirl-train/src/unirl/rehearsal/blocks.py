"""Blocks of a model that are alike run once: the others make tensors of the same shapes, and count what the first did.

A block that is repeated with gradient holds as many bytes until its backward pass as one that ran, then counts what the
backward pass of that one took, and gives its inputs and parameters gradients. Hooks around it (FSDP) run as always.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from unirl.rehearsal.repeats import Cost, Repeats, Shape, circumstances, replaced, shape_of
from unirl.train.backend.activation_offload import is_offloaded
from unirl.train.backend.ulysses import UlyssesExchange
from unirl.train.backend.wrap import is_checkpointed
from unirl.types.devices import PRETEND
from unirl.types.errors import ContractError

Value = Any  # Any: arguments and results of a module

FEWEST = 3
"""Modules of a list that are alike, from which on they are blocks of a model."""


@dataclass
class _Record:
    """What a block that ran did."""

    forward: Cost
    kept_bytes: int
    """Bytes that came to stay with its forward, without its results."""
    inputs: tuple[int, ...]
    """Places of the arguments that its backward pass needs."""
    results: Value
    """A tree of `Shape`s, `_Given`s and plain values."""
    backward: Cost | None = None
    trained: frozenset[str] = frozenset()
    """Parameters that its backward pass gives a gradient: of the experts of a token, those of its kind."""


@dataclass(frozen=True)
class _Given:
    """A result that is an argument."""

    place: int


@dataclass(frozen=True)
class Block:
    """A member of a list, with its own forward."""

    module: nn.Module
    forward: Callable[..., Value]
    likeness: Value
    """Equal for modules with equal classes and parameters."""
    is_end: bool
    """True for the last one of its likeness: of its results some may be used by nothing (the text of the last block of
    Qwen-Image), and its backward pass is shorter then."""
    is_last: bool
    """True for the last one of its likeness and `is_end`, whose backward pass is the first."""
    is_checkpointed: bool
    """True if its backward pass begins with its forward, for which it keeps all arguments."""


class Blocks:
    """Within `active`, blocks of modules run once for each shape of their arguments."""

    def __init__(self, repeats: Repeats) -> None:
        self._repeats = repeats
        self._records: dict[Value, _Record] = {}

    @contextmanager
    def active(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Take the place of the blocks' `forward`."""
        with ExitStack() as stack:
            for block in _blocks(modules):
                stack.enter_context(replaced(block.module, "forward", self.running(block)))
            yield

    def running(self, block: Block) -> Callable[..., Value]:
        """Its forward, which runs where its costs are not known yet."""

        def run(*args: Value, **kwargs: Value) -> Value:
            key = self._key(block, args, kwargs)
            if key is None:
                return block.forward(*args, **kwargs)
            record, trains = self._records.get(key), torch.is_grad_enabled()
            if record is None or (trains and record.backward is None and block.is_last):
                return self._recorded(key, block, args, kwargs)
            self._repeats.count(record.forward)
            if not trains:
                flat = tree_leaves((args, kwargs))
                made = tree_map_only(Shape, lambda shape: shape.made(trains=False), record.results)
                return tree_map_only(_Given, lambda given: flat[given.place], made)
            return self._stand_in(key, block, args, kwargs)

        return run

    def _recorded(self, key: Value, block: Block, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        """Run a block and note what it does."""
        ledger = self._repeats.mode.ledger
        if not torch.is_grad_enabled():
            cost, out = self._repeats.measured(lambda: block.forward(*args, **kwargs))
            self._records[key] = _Record(cost, 0, (), _results(out, tree_leaves((args, kwargs))))
            return out
        given, spec = tree_flatten((args, kwargs))
        flat, places = [*given], _with_gradient(given)
        timed = _Timed(self._repeats, block.module)
        marked = _Ends.apply(timed, *(flat[place] for place in places))
        for place, tensor in zip(places, marked, strict=True):
            flat[place] = tensor
        own_args, own_kwargs = tree_unflatten(flat, spec)
        before, saved = ledger.device_bytes, set[int]()

        def noted(tensor: Tensor) -> Tensor:
            saved.add(_storage(tensor))
            return tensor.detach()  # the tensor itself may be a result, which would keep itself alive

        with saved_tensors_hooks(noted, lambda tensor: tensor):
            cost, out = self._repeats.measured(lambda: block.forward(*own_args, **own_kwargs))
        results = _results(out, flat)
        # What it passes on has the gradients of later blocks, which are no part of its backward pass.
        out = _with_given(out, results, given)
        storages = {_storage(value) for value in flat if isinstance(value, Tensor)}
        made = {_storage(each): each for each in tree_leaves(out) if isinstance(each, Tensor)}
        made_bytes = sum(each.untyped_storage().nbytes() for name, each in made.items() if name not in storages)
        # A checkpoint keeps all arguments, and not by way of hooks.
        kept = [place for place in _tensors(flat) if block.is_checkpointed or _storage(flat[place]) in saved]
        record = _Record(cost, ledger.device_bytes - before - made_bytes, tuple(kept), results)
        self._records[key] = timed.record = record
        for each, result in zip(tree_leaves(out), tree_leaves(results), strict=True):
            if isinstance(result, Shape) and each.grad_fn is not None:
                each.grad_fn.register_prehook(lambda _: timed.begin())  # after hooks of the tensor, such as FSDP's
        return out

    def _stand_in(self, key: Value, block: Block, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        """Results with a graph to the block's inputs and parameters."""
        record = self._records[key]
        flat, _ = tree_flatten((args, kwargs))
        inputs = [flat[place] for place in _with_gradient(flat)]
        saved = [flat[place] for place in record.inputs]
        # A gradient of this rank's part becomes one of the DTensor.
        named = {
            name: each.to_local() if isinstance(each, DTensor) else each
            for name, each in block.module.named_parameters()
            if each.requires_grad
        }
        shapes, spec = tree_flatten(record.results)
        made = [shape for shape in shapes if isinstance(shape, Shape)]
        names = [None] * len(inputs) + [*named]
        kept = _Kept(self._repeats, lambda: self._records[key], made, saved, names)
        results = iter(_StandIn.apply(kept, *inputs, *named.values()))
        found = [next(results) if isinstance(shape, Shape) else shape for shape in shapes]
        return tree_unflatten([flat[each.place] if isinstance(each, _Given) else each for each in found], spec)

    def _key(self, block: Block, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value | None:
        """What a block's cost depends on; None if it must run: within a checkpoint, whose recomputation keeps the same
        tensors, for arguments that it may change, and where nothing says when its backward pass ends."""
        if _top_saved_tensors_default_hooks(True) is not None:
            return None
        try:
            parts = tuple(_described(value) for value in (*args, *sorted(kwargs.items())))
        except _UnknownError:
            return None
        trains = torch.is_grad_enabled()
        if trains and not _with_gradient(tree_leaves((args, kwargs))):
            return None
        return block.likeness, trains and block.is_end, parts, circumstances()


def _blocks(modules: Iterable[nn.Module]) -> Iterator[Block]:
    """Members of lists of modules that are like at least two others of theirs and hold no units of FSDP inside."""
    for root in modules:
        for several in root.modules():
            if not isinstance(several, nn.ModuleList):
                continue
            members = [
                m for m in several.children() if not any(isinstance(c, FSDPModule) for c in m.modules() if c is not m)
            ]
            alike: dict[Value, list[nn.Module]] = {}
            for member in members:
                alike.setdefault(_likeness(member), []).append(member)
            for likeness, group in alike.items():
                # What leaves for the host leaves by the order in which blocks run.
                is_repeated = len(group) >= FEWEST and not is_offloaded(group[0].forward)
                for member in group if is_repeated else ():
                    is_end = member is group[-1]
                    is_last = is_end or member is group[-2]
                    yield Block(member, member.forward, likeness, is_end, is_last, is_checkpointed(member.forward))


def _likeness(module: nn.Module) -> Value:
    classes = tuple(type(part).__qualname__ for part in module.modules())
    shapes = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    )
    return classes, shapes


class _UnknownError(Exception):
    """An argument may be changed by the block, or decide what it computes."""


def _described(value: Value) -> Value:
    """An argument as far as a block's cost depends on it. Raises _UnknownError, as for lists, in which blocks of some
    autoencoders leave frames for the next call."""
    if isinstance(value, Tensor):
        strides = value.stride() if isinstance(value, FakeTensor) else ()
        return tuple(value.shape), strides, value.dtype, value.requires_grad
    if value is None or isinstance(value, int | float | str | enum.Enum | torch.dtype | range):
        return value
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if isinstance(value, UlyssesExchange):
        ring = value.ring
        return value.rank, value.size, None if ring is None else (ring.rank, ring.size)
    if isinstance(value, Mapping):
        return tuple((name, _described(each)) for name, each in value.items())
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value), *(_described(tuple(each) if isinstance(each, list) else each) for each in fields)
    raise _UnknownError


def _with_gradient(leaves: Sequence[Value]) -> list[int]:
    """Places of the tensors that the graph goes through."""
    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _results(out: Value, flat: Sequence[Value]) -> Value:
    """Results as a record keeps them. flat: the arguments."""
    places = {_storage(leaf): place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor)}

    def kept(tensor: Tensor) -> Shape | _Given:
        place = places.get(_storage(tensor))
        is_whole = place is not None and flat[place].shape == tensor.shape
        return _Given(place) if place is not None and is_whole else shape_of(tensor)

    return tree_map_only(Tensor, kept, out)


def _with_given(out: Value, results: Value, flat: Sequence[Value]) -> Value:
    """What a block makes, with the arguments themselves where it gives those."""
    leaves, spec = tree_flatten(out)
    kinds = tree_leaves(results)
    pairs = zip(leaves, kinds, strict=True)
    return tree_unflatten([flat[kind.place] if isinstance(kind, _Given) else leaf for leaf, kind in pairs], spec)


def _tensors(leaves: Sequence[Value]) -> list[int]:
    """Places of tensors."""
    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Timed:
    """The backward pass of a block that ran: between the gradients of its results and those of its inputs."""

    def __init__(self, repeats: Repeats, module: nn.Module) -> None:
        self._repeats = repeats
        self._trained = set[str]()
        self._hooks = [
            each.register_hook(partial(self._note, name))
            for name, each in module.named_parameters()
            if each.requires_grad
        ]
        self._watch: Any = None  # Any: a context manager that outlives a function
        self._found: list[Cost] = []
        self.record: _Record | None = None

    def _note(self, name: str, grad: Tensor) -> None:
        self._trained.add(name)

    def begin(self) -> None:
        if self._watch is None:
            self._watch = self._repeats.watched()
            self._found = self._watch.__enter__()

    def end(self) -> None:
        if self._watch is None:
            return
        self._watch.__exit__(None, None, None)
        self._watch = None
        for hook in self._hooks:
            hook.remove()
        if self.record is not None:
            self.record.backward, self.record.trained = self._found[0], frozenset(self._trained)


class _Ends(torch.autograd.Function):
    """Passes inputs on; its backward ends that of the block."""

    @staticmethod
    def forward(ctx: Any, timed: _Timed, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.timed = timed
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Value, ...]:
        ctx.timed.end()
        return None, *grads


@dataclass
class _Kept:
    """What a repeated block knows until its backward pass."""

    repeats: Repeats
    record: Callable[[], _Record]
    """The last one, which knows what a backward pass does once one has run."""
    made: list[Shape]
    saved: list[Tensor]
    names: list[str | None]
    """The names of parameters among what the graph goes through."""


class _StandIn(torch.autograd.Function):
    """A block that is not run."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept = kept
        ctx.likes = [shape_of(tensor) for tensor in tensors]
        ctx.held = torch.empty(max(kept.record().kept_bytes, 0), dtype=torch.uint8, device=PRETEND)
        results = tuple(shape.made(trains=False) for shape in kept.made)
        ctx.mark_non_differentiable(
            *(result for result, shape in zip(results, kept.made, strict=True) if not shape.trains)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Value, ...]:
        record = ctx.kept.record()
        if record.backward is None:
            raise ContractError("a repeated block's backward pass comes before that of the block that ran")
        ctx.kept.repeats.count(record.backward)
        ctx.held, ctx.kept.saved = None, []
        needed = [
            is_needed and (name is None or name in record.trained)
            for is_needed, name in zip(ctx.needs_input_grad[1:], ctx.kept.names, strict=True)
        ]
        pairs = zip(ctx.likes, needed, strict=True)
        return None, *(like.made(trains=False) if is_needed else None for like, is_needed in pairs)
