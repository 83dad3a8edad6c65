"""Markers that say how a method of a role is called on many workers. Data, not behaviour: the runtime reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class Dispatch(Enum):
    """How arguments reach the workers of a role."""

    BROADCAST = "broadcast"
    """Every rank gets the same arguments."""
    SCATTER = "scatter"
    """Arguments are lists with one item a rank."""
    DP_SCATTER = "dp_scatter"
    """Batches are cut into equal contiguous shards, one per rank; the rest is broadcast."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called. Never a method with collectives inside."""


class Collect(Enum):
    """How results come back."""

    FIRST = "first"
    """The value of rank 0."""
    ALL = "all"
    """A list, one item a rank."""
    CONCAT = "concat"
    """Batches joined in rank order."""
    HOLD = "hold"
    """The value stays with the worker that made it; the driver gets a handle and the metadata."""


@dataclass(frozen=True)
class RemoteMethod:
    """How one method is dispatched and collected."""

    dispatch: Dispatch
    collect: Collect


_MARKER = "__unirl_remote_method__"


def distributed(dispatch: Dispatch, collect: Collect = Collect.FIRST) -> Callable[[FunctionT], FunctionT]:
    """Mark a method as callable through a runtime. Calling it directly is unchanged."""

    def mark(function: FunctionT) -> FunctionT:
        setattr(function, _MARKER, RemoteMethod(dispatch, collect))
        return function

    return mark


def remote_method(owner: type, name: str) -> RemoteMethod:
    """The marker of `owner.name`: its own, or that of the nearest base whose method of the same name carries one.

    An override keeps the marker of what it overrides unless it declares another. Raises AttributeError without one.
    """
    for base in owner.__mro__:
        function = vars(base).get(name)
        marker = vars(function).get(_MARKER) if isinstance(function, FunctionType) else None
        if isinstance(marker, RemoteMethod):
            return marker
    raise AttributeError(f"{owner.__name__}.{name} is not marked with @distributed, so a runtime cannot call it")
