"""One worker: named components, and the values that they hold. Needs no transport."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from unirl.distributed.dispatch import HeldKey
from unirl.distributed.tensor.transport import outgoing
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.closing import Closeable
from unirl.types.protocols.hosting import HostingPool
from unirl.types.roles import MeshPlace, Placed, RemoteMethod, remote_method
from unirl.types.rollout import RolloutResp

ResultT = TypeVar("ResultT")

Builder = Callable[["WorkerContext"], Mapping[str, object]]
"""Builds the components of one worker. Must pickle: a module-level function or functools.partial of one."""


@dataclass(frozen=True)
class WorkerContext:
    """Rank and device of a worker."""

    rank: int
    world_size: int
    device: str
    hosting: Mapping[str, HostingPool] = field(default_factory=dict)
    """Pools without devices that its components ask, by name."""


@dataclass(frozen=True)
class ComponentInfo:
    """What the driver needs to call a component without importing its class."""

    owner: str
    """Name of its class."""
    methods: Mapping[str, RemoteMethod]
    """Marked methods."""

    @classmethod
    def of(cls, owner: type) -> Self:
        """Read the markers of a class, inherited ones included."""
        methods = {}
        for name in dir(owner):
            try:
                methods[name] = remote_method(owner, name)
            except AttributeError:
                continue  # an ordinary method
        return cls(owner.__name__, methods)


@runtime_checkable
class Holdable(Protocol):
    """Interface of results of methods collected by HOLD."""

    def metadata_only(self) -> Any:  # Any: a Batch of the same class
        """The value without its large tensors."""


@runtime_checkable
class Openable(Protocol):
    """Stands for a value that is elsewhere; the worker opens it before use. Pickles."""

    def opened(self, kept: dict[str, Any]) -> Any:  # Any: rows, weights
        """The value itself, in this process.

        kept: what this worker keeps between calls (buffers, connections); changed in place.
        """


@dataclass(frozen=True)
class Usage:
    """Resources used by processes: total CPU seconds, and peak resident bytes summed over processes."""

    cpu_s: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class OwnRows:
    """Rows of a value that the worker itself holds."""

    key: HeldKey
    rows: tuple[int, ...]


class Worker:
    """Components and held values of one rank. A local runtime owns one directly; each Ray actor wraps one."""

    def __init__(self, builder: Builder, context: WorkerContext) -> None:
        self.context = context
        self._components = dict(builder(context))
        self._held: dict[HeldKey, Any] = {}  # Any: held values are of any type

    def component_infos(self) -> dict[str, ComponentInfo]:
        """Role name -> what the driver needs to call it."""
        return {name: ComponentInfo.of(type(component)) for name, component in self._components.items()}

    @property
    def mesh_place(self) -> MeshPlace:
        """This worker's place in the mesh, as its components report; a data-parallel rank if none reports one.

        Raises ConfigError if two components disagree.
        """
        told = {name: item.mesh_place for name, item in self._components.items() if isinstance(item, Placed)}
        if len(set(told.values())) > 1:
            raise ConfigError(f"components of rank {self.context.rank} disagree on where it stands: {told}")
        own = MeshPlace(dp_rank=self.context.rank, dp_size=self.context.world_size)
        return next(iter(told.values()), own)

    def component(self, name: str) -> object:
        """The component itself (this process only)."""
        return self._components[name]

    def invoke(
        self,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hold_as: HeldKey | None,
        is_wanted: bool = True,
    ) -> Any:
        """Call a component. Held keys in the arguments are replaced by this worker's values. Returns only the metadata
        of a held result, and None if the driver does not want the result (`is_wanted`)."""
        ready = [self._resolve(value) for value in args]
        named = {name: self._resolve(value) for name, value in kwargs.items()}
        result = getattr(self._components[role], method)(*ready, **named)
        if hold_as is None:
            return result if is_wanted else None
        if not isinstance(result, Holdable):
            raise ContractError(f"{role}.{method} is collected by HOLD but returned a {type(result).__name__}")
        meta = result.metadata_only()
        self._held[hold_as] = result
        return meta

    def map_held(
        self, key: HeldKey, function: Callable[..., ResultT], args: tuple[Any, ...], is_wanted: bool
    ) -> ResultT | None:
        """function(value, *args) on this worker's share of a held value; returns None if the driver does not want the
        result."""
        result = function(self._resolve(key), *args)
        return result if is_wanted else None

    def hold(self, key: HeldKey, value: Any, is_wanted: bool = True) -> Any:
        """Hold a value from another process; returns its metadata if the driver wants it."""
        self._held[key] = value
        return value.metadata_only() if is_wanted else None

    def pick(self, key: HeldKey, rows: Sequence[int]) -> Any:  # Any: held values are of any type
        """Some samples of a held value, for a worker that assembles a new one."""
        return self._resolve(key).select(rows)

    def assemble(
        self,
        hold_as: HeldKey,
        pieces: Sequence[OwnRows | None],
        order: Sequence[int] | None,
        arrived: Sequence[RolloutResp],
    ) -> RolloutResp:
        """Join pieces, order them and hold the result; returns its metadata.

        pieces: rows of this worker's values, or None for the next item of `arrived`, which are from other workers.
        """
        others = iter(arrived)
        parts = [next(others) if piece is None else self.pick(piece.key, piece.rows) for piece in pieces]
        if len(parts) > 1:
            # Rows from other workers are on the CPU.
            parts = [RolloutResp.concat([outgoing(part) for part in parts] if arrived else parts)]
        whole = parts[0] if order is None else parts[0].select(order)
        return self.hold(hold_as, whole)

    def usage(self) -> Usage:
        """Resources used by this process so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)

    def close(self) -> None:
        """Close the components that implement `Closeable`."""
        for component in self._components.values():
            if isinstance(component, Closeable):
                component.close()

    def release(self, key: HeldKey) -> None:
        """Free a held value."""
        self._held.pop(key, None)

    def num_held(self) -> int:
        """Number of values that this worker holds."""
        return len(self._held)

    def _resolve(self, value: Any) -> Any:
        if not isinstance(value, HeldKey):
            return value
        if value not in self._held:
            raise ContractError(f"held value {value.number} was released before it was used")
        return self._held[value]
