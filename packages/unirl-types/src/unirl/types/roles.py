"""How a method of a role is called on many workers: markers, and where a worker stands. The runtime reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Literal, Protocol, TypeVar, runtime_checkable

from unirl.types.errors import ContractError

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

Axis = Literal["dp", "sp", "heads", "ring", "tp", "ep", "all"]
"""Ranks that tell each other something: "dp" those with the same part of different samples, "sp" those with parts of
the same samples, "tp" those with parts of the layers that compute the same samples, "ep" those that have the experts of
a model together, "all" every rank that has a shard of the model."""


class Dispatch(Enum):
    """How arguments reach the workers of a role."""

    BROADCAST = "broadcast"
    """Every rank gets the same arguments."""
    SCATTER = "scatter"
    """Arguments are lists with one item per shard."""
    DP_SCATTER = "dp_scatter"
    """Batches are cut into equal contiguous shards, one per data-parallel place, whose ranks all get it; the rest is
    broadcast."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called. Never a method with collectives inside."""


class Collect(Enum):
    """How results come back: of each data-parallel place its first rank answers."""

    FIRST = "first"
    """The value of the first shard."""
    ALL = "all"
    """A list, one item per shard."""
    CONCAT = "concat"
    """Batches joined in the order of the shards."""
    HOLD = "hold"
    """The value stays with the workers that made it; the driver gets a handle and the metadata."""


@dataclass(frozen=True)
class MeshPlace:
    """Where a worker stands among those of its group, in each way of dividing work.

    Data parallel (dp): shards of a batch. Sequence (sp) and tensor parallel (tp): ranks that work on the same samples
    together. Expert parallel (ep): ranks that have the experts together, whatever their samples. Of the sp_size ranks
    every sp_size / ring_size neighbours exchange tokens for heads. Raises ContractError for a rank outside its size.
    """

    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    ring_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "sp", "tp", "ep"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ContractError(f"MeshPlace has {axis}_rank = {rank} of {axis}_size = {size}")


@runtime_checkable
class Placed(Protocol):
    """A component that knows how the workers of its group divide their work: a training backend, a sharded engine."""

    @property
    def mesh_place(self) -> MeshPlace:
        """Where this worker stands."""
        ...


@dataclass(frozen=True)
class RemoteMethod:
    """How one method is dispatched and collected."""

    dispatch: Dispatch
    collect: Collect
    is_control: bool = False
    """True if it does not wait for the call that runs; it is called on all workers, in another thread of each."""


_MARKER = "__unirl_remote_method__"


def distributed(
    dispatch: Dispatch, collect: Collect = Collect.FIRST, *, is_control: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Mark a method as callable through a runtime. Calling it directly is unchanged.

    is_control: see `RemoteMethod`. Raises ContractError for a control method that is not broadcast.
    """
    if is_control and dispatch is not Dispatch.BROADCAST:
        raise ContractError(f"a control method reaches every worker: mark it BROADCAST, not {dispatch.name}")

    def mark(function: FunctionT) -> FunctionT:
        setattr(function, _MARKER, RemoteMethod(dispatch, collect, is_control))
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
