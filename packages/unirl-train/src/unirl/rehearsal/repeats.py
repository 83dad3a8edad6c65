"""Forwards without gradient that are alike run once: the others repeat what the first one counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only

from unirl.rehearsal.mode import Rehearsal

Value = Any  # Any: arguments and results of a model


@dataclass(frozen=True)
class _Record:
    """What one forward did."""

    peak: int
    """Most bytes above those before it."""
    flops: int
    collectives: dict[str, int]
    out: Value
    """Its result; a repetition gets fresh tensors of these shapes."""


@contextmanager
def repeat_forwards(mode: Rehearsal, modules: Iterable[nn.Module]) -> Generator[None]:
    """Within it, a forward of these modules without gradient runs once per shape of its arguments."""
    before = {}
    for module in modules:
        before[module] = module.forward
        module.forward = _repeating(mode, module.forward)
    try:
        yield
    finally:
        for module, forward in before.items():
            module.forward = forward


def _repeating(mode: Rehearsal, forward: Callable[..., Value]) -> Callable[..., Value]:
    records: dict[Value, _Record] = {}

    def run(*args: Value, **kwargs: Value) -> Value:
        key = None if torch.is_grad_enabled() else _key(args, kwargs)
        if key is None:
            return forward(*args, **kwargs)
        if key not in records:
            records[key], out = _recorded(mode, lambda: forward(*args, **kwargs))
            return out
        record = records[key]
        mode.ledger.bump(record.peak)
        mode.counts.flops[mode.phase] += record.flops
        for name, size in record.collectives.items():
            mode.collectives_of_phase()[name] += size
        return tree_map_only(Tensor, _fresh, record.out)

    return run


def _recorded(mode: Rehearsal, call: Callable[[], Value]) -> tuple[_Record, Value]:
    flops, moved = mode.counts.flops[mode.phase], dict(mode.collectives_of_phase())
    with mode.ledger.watched() as watch:
        out = call()
    now = mode.collectives_of_phase()
    passed = {name: now[name] - moved.get(name, 0) for name in now if now[name] != moved.get(name, 0)}
    shapes = tree_map_only(Tensor, lambda tensor: tensor.detach(), out)
    return _Record(watch.peak, mode.counts.flops[mode.phase] - flops, passed, shapes), out


def _fresh(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _key(args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value | None:
    """What a forward's cost depends on; None for arguments that it may change, such as caches."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[Value] = []
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        elif leaf is None or isinstance(leaf, int | float | str | torch.dtype):
            parts.append(leaf)
        else:
            return None
    casts = torch.is_autocast_enabled("pretend"), torch.get_autocast_dtype("pretend")
    return str(spec), tuple(parts), casts
