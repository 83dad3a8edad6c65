"""Roles and runtimes: the trainer calls `role.method(...)`, the runtime decides where that happens.

A runtime has a number of workers. Each worker builds the same named components; a role is one name on all of
them. Methods carry `@distributed` markers (`unirl.types.roles`), which say how arguments are cut and how results
come back. A result that is held stays with the workers that made it: the driver gets its metadata and a handle.
"""

from __future__ import annotations

import itertools
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from unirl.distributed.dispatch import HeldKey, collected, rank_arguments, scatter
from unirl.types.errors import ConfigError, ContractError, UniRLError
from unirl.types.protocols import Closeable
from unirl.types.roles import Collect, Dispatch, RemoteMethod, remote_method
from unirl.types.rollout import RolloutResp

ResultT = TypeVar("ResultT")

Builder = Callable[["WorkerContext"], Mapping[str, object]]
"""Builds the components of one worker. A module-level function or functools.partial of one, so that it pickles."""


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands."""

    rank: int
    world_size: int
    device: str


@dataclass(frozen=True)
class ComponentInfo:
    """What the driver knows of a component: enough to call it, without importing its class."""

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
    """What a method collected by HOLD returns."""

    def metadata_only(self) -> Any:  # Any: a Batch of the same class
        """The value without its large tensors."""


@dataclass(frozen=True)
class Usage:
    """What processes used: CPU seconds in all, and peak resident bytes summed over processes."""

    cpu_s: float
    peak_rss_bytes: int


class Worker:
    """Components and held values of one rank. Local runtimes own one directly; Ray actors wrap one each."""

    def __init__(self, builder: Builder, context: WorkerContext) -> None:
        self.context = context
        self._components = dict(builder(context))
        self._held: dict[HeldKey, Any] = {}  # Any: held values are of any type

    def component_infos(self) -> dict[str, ComponentInfo]:
        """Role name -> what the driver needs to know of it."""
        return {name: ComponentInfo.of(type(component)) for name, component in self._components.items()}

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
        """Call a component. Held keys among the arguments become this worker's values; a held result returns
        its metadata only, and one that the driver would drop (`is_wanted` false) returns None."""
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

    def map_held(self, key: HeldKey, function: Callable[..., ResultT], args: tuple[Any, ...]) -> ResultT:
        """function(value, *args) on this worker's own held value."""
        return function(self._resolve(key), *args)

    def hold(self, key: HeldKey, value: Any) -> Any:
        """Keep a value that came from elsewhere; returns its metadata."""
        self._held[key] = value
        return value.metadata_only()

    def usage(self) -> Usage:
        """What this process used so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)

    def close(self) -> None:
        """Close the components that hold something until they are closed."""
        for component in self._components.values():
            if isinstance(component, Closeable):
                component.close()

    def release(self, key: HeldKey) -> None:
        """Forget a held value."""
        self._held.pop(key, None)

    def num_held(self) -> int:
        """How many values this worker holds."""
        return len(self._held)

    def _resolve(self, value: Any) -> Any:
        if not isinstance(value, HeldKey):
            return value
        if value not in self._held:
            raise ContractError(f"held value {value.number} was released before it was used")
        return self._held[value]


class Held:
    """A result that stays with its producers; the driver has its ids and versions, and what it has attached itself."""

    def __init__(self, runtime: Runtime, key: HeldKey, metas: list[RolloutResp]) -> None:
        self._runtime = runtime
        self._metas = metas
        self._is_released = False
        self.key = key

    @property
    def meta(self) -> RolloutResp:
        """The metadata of all ranks' shares, in order."""
        return collected(Collect.CONCAT, self._metas)

    def key_for(self, runtime: Runtime) -> HeldKey:
        """The key, for a call on `runtime`. Raises ContractError where the value does not lie with its workers."""
        if self._is_released:
            raise ContractError(f"held value {self.key.number} was released before it was used")
        if runtime is not self._runtime:
            raise ContractError(f"held value {self.key.number} lies with other workers; pass held.fetch() instead")
        return self.key

    def map(self, function: Callable[..., ResultT], *args: Any) -> list[ResultT]:
        """function(value, *args) where the value lies; one result a rank. `function` must pickle."""
        return self._runtime.map_held(self.key_for(self._runtime), function, [args] * len(self._metas))

    def attach(self, track: str, **fields: Tensor) -> None:
        """Write values of all samples of a track, [B, ...] each, into it where it lies; every rank gets its own rows.

        Raises ContractError where the sizes disagree.
        """
        sizes = [meta.track(track).batch_size for meta in self._metas]
        wrong = {name: len(values) for name, values in fields.items() if len(values) != sum(sizes)}
        if wrong:
            raise ContractError(f"track {track} holds {sum(sizes)} samples, the values to attach have {wrong}")
        cut = {name: values.split(sizes) for name, values in fields.items()}
        shares = [{name: parts[rank] for name, parts in cut.items()} for rank in range(len(sizes))]
        self._runtime.map_held(self.key_for(self._runtime), _attach, [(track, share) for share in shares])
        self._metas = [meta.with_values(track, **own) for meta, own in zip(self._metas, shares, strict=True)]

    def fetch(self) -> Any:  # Any: what the method that was collected by HOLD returns
        """The whole value in this process: the ranks' shares in order, joined. Heavy; the workers keep theirs."""
        return collected(Collect.CONCAT, self.map(_itself))

    def release(self) -> None:
        """Free the value on every worker. Safe to call twice, and after the runtime has closed."""
        if not self._is_released and not self._runtime.is_closed:
            self._runtime.release(self.key)
        self._is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            "a held value travels as a direct argument of a role's method only, not inside a list, dict or object"
        )


def _itself(value: ResultT) -> ResultT:
    return value


def _attach(resp: RolloutResp, track: str, fields: dict[str, Tensor]) -> None:
    resp.tracks[track] = resp.tracks[track].replace(**fields)


class Role:
    """One component name on all workers. `role.method(...)` obeys the method's marker."""

    def __init__(self, runtime: Runtime, name: str, info: ComponentInfo) -> None:
        self._runtime = runtime
        self._name = name
        self._info = info

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        marker = self._info.methods.get(method)
        if marker is None:
            raise AttributeError(
                f"{self._info.owner}.{method} is not marked with @distributed, so a runtime cannot call it; "
                f"marked are {sorted(self._info.methods)}"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._runtime.call(self._name, method, marker.dispatch, marker.collect, args, kwargs)

        return call


class Runtime(ABC):
    """Calls components on `num_ranks` workers. Use as a context manager: leaving it stops every worker."""

    num_ranks: int
    is_closed: bool = False

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @abstractmethod
    def _infos(self) -> Mapping[str, ComponentInfo]:
        """Role name -> what is known of its component."""

    @abstractmethod
    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        """Run worker methods: (rank, worker method, arguments); results in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Stop every worker. Safe to call twice."""

    def role(self, name: str) -> Role:
        """The component `name` on all workers. Raises ConfigError for an unknown name."""
        infos = self._infos()
        if name not in infos:
            raise ConfigError(f"no component is called {name!r}; there are {sorted(infos)}")
        return Role(self, name, infos[name])

    def has_role(self, name: str) -> bool:
        """Whether the workers built a component of that name."""
        return name in self._infos()

    def call(
        self,
        role: str,
        method: str,
        dispatch: Dispatch,
        collect: Collect,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Dispatch one marked method and collect its results."""
        if dispatch is Dispatch.RANK_ZERO and collect is Collect.HOLD:
            raise ContractError(f"{role}.{method}: a held value lies on every rank, RANK_ZERO makes it on one")
        ready = tuple(self._key_of(value) for value in args)
        named = {name: self._key_of(value) for name, value in kwargs.items()}
        hold_as = HeldKey(next(self._numbers)) if collect is Collect.HOLD else None
        per_rank = rank_arguments(dispatch, ready, named, self.num_ranks)
        try:
            results = self._invoke_all(
                [
                    (rank, "invoke", (role, method, own, own_named, hold_as, collect is not Collect.FIRST or rank == 0))
                    for rank, (own, own_named) in enumerate(per_rank)
                ]
            )
            value = None if collect is Collect.HOLD else collected(collect, results)
        except UniRLError:
            if hold_as is not None and not self.is_closed:
                self.release(hold_as)  # the ranks that did succeed
            raise
        return value if hold_as is None else Held(self, hold_as, results)

    def map_held(
        self, key: HeldKey, function: Callable[..., ResultT], rank_args: Sequence[tuple[Any, ...]]
    ) -> list[ResultT]:
        """function(value, *args) on every rank's own held value, with that rank's own args."""
        return self._invoke_all([(rank, "map_held", (key, function, args)) for rank, args in enumerate(rank_args)])

    def hold(self, value: RolloutResp) -> Held:
        """Cut a response over the workers and hold it there. The rare way in; results usually stay where they arise."""
        key = HeldKey(next(self._numbers))
        shards = scatter(value, self.num_ranks)
        metas = self._invoke_all([(rank, "hold", (key, shard)) for rank, shard in enumerate(shards)])
        return Held(self, key, metas)

    def usage(self) -> Usage:
        """What the workers used so far, and the driver where it is a process of its own."""
        parts = self._invoke_all([(rank, "usage", ()) for rank in range(self.num_ranks)])
        return Usage(sum(part.cpu_s for part in parts), sum(part.peak_rss_bytes for part in parts))

    def release(self, key: HeldKey) -> None:
        """Forget a held value on every rank."""
        self._invoke_all([(rank, "release", (key,)) for rank in range(self.num_ranks)])

    def num_held(self) -> int:
        """How many held values the busiest rank keeps; grows when releases are forgotten."""
        return max(self._invoke_all([(rank, "num_held", ()) for rank in range(self.num_ranks)]))

    def _key_of(self, value: Any) -> Any:
        return value.key_for(self) if isinstance(value, Held) else value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LocalRuntime(Runtime):
    """One worker in this process: no Ray, no copies."""

    num_ranks = 1

    def __init__(self, builder: Builder, *, device: str = "cpu") -> None:
        super().__init__()
        self._worker = Worker(builder, WorkerContext(rank=0, world_size=1, device=device))

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self._worker.component_infos()

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return [getattr(self._worker, method)(*args) for _, method, args in calls]

    def component(self, name: str) -> object:
        """The component itself, for tests and notebooks."""
        return self._worker.component(name)

    def close(self) -> None:
        """Close the components that hold threads or connections."""
        self._worker.close()
