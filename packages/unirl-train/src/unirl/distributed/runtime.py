"""Roles and runtimes: the trainer calls `role.method(...)`, the runtime decides where that happens.

A runtime has a number of workers. Each worker builds the same named components; a role is one name on all of
them. Methods carry `@distributed` markers (`unirl.types.roles`), which say how arguments are cut and how results
come back. A result that is held stays with the workers that made it: the driver gets its metadata and a handle.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from unirl.distributed.dispatch import collected, rank_arguments
from unirl.types.errors import ConfigError, ContractError
from unirl.types.roles import Collect, remote_method
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
class HeldKey:
    """Names a held value in each worker's own table."""

    number: int


class Worker:
    """Components and held values of one rank. Local runtimes own one directly; Ray actors wrap one each."""

    def __init__(self, builder: Builder, context: WorkerContext) -> None:
        self.context = context
        self._components = dict(builder(context))
        self._held: dict[HeldKey, Any] = {}  # Any: held values are of any type

    def component_types(self) -> dict[str, type]:
        """Role name -> class, for the driver to read markers from."""
        return {name: type(component) for name, component in self._components.items()}

    def component(self, name: str) -> object:
        """The component itself (this process only)."""
        return self._components[name]

    def invoke(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], hold_as: HeldKey | None
    ) -> Any:
        """Call a component. Held keys among the arguments become this worker's values; a held result returns
        its metadata only."""
        ready = [self._resolve(value) for value in args]
        named = {name: self._resolve(value) for name, value in kwargs.items()}
        result = getattr(self._components[role], method)(*ready, **named)
        if hold_as is None:
            return result
        self._held[hold_as] = result
        return result.metadata_only()

    def map_held(self, key: HeldKey, function: Callable[..., ResultT], args: tuple[Any, ...]) -> ResultT:
        """function(value, *args) on this worker's own held value."""
        return function(self._held[key], *args)

    def release(self, key: HeldKey) -> None:
        """Forget a held value."""
        self._held.pop(key, None)

    def _resolve(self, value: Any) -> Any:
        if not isinstance(value, HeldKey):
            return value
        if value not in self._held:
            raise ContractError(f"held value {value.number} was released before it was used")
        return self._held[value]


class Held:
    """A result that stays with its producers. `meta` has ids, rewards and versions of all samples in order."""

    def __init__(self, runtime: Runtime, key: HeldKey, meta: RolloutResp) -> None:
        self._runtime = runtime
        self.key = key
        self.meta = meta

    def map(self, function: Callable[..., ResultT], *args: Any) -> list[ResultT]:
        """function(value, *args) where the value lies; one result a rank. `function` must pickle."""
        return self._runtime.map_held(self.key, function, args)

    def release(self) -> None:
        """Free the value on every worker."""
        self._runtime.release(self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Role:
    """One component name on all workers. `role.method(...)` obeys the method's marker."""

    def __init__(self, runtime: Runtime, name: str, owner: type) -> None:
        self._runtime = runtime
        self._name = name
        self._owner = owner

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        marker = remote_method(self._owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._runtime.call(self._name, method, marker.dispatch, marker.collect, args, kwargs)

        return call


class Runtime(ABC):
    """Calls components on `num_ranks` workers. Use as a context manager: leaving it stops every worker."""

    num_ranks: int

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @abstractmethod
    def _types(self) -> dict[str, type]:
        """Role name -> component class."""

    @abstractmethod
    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        """Run worker methods: (rank, worker method, arguments); results in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Stop every worker. Safe to call twice."""

    def role(self, name: str) -> Role:
        """The component `name` on all workers. Raises ConfigError for an unknown name."""
        types = self._types()
        if name not in types:
            raise ConfigError(f"no component is called {name!r}; there are {sorted(types)}")
        return Role(self, name, types[name])

    def has_role(self, name: str) -> bool:
        """Whether the workers built a component of that name."""
        return name in self._types()

    def call(self, role: str, method: str, dispatch: Any, collect: Collect, args: Any, kwargs: Any) -> Any:
        """Dispatch one marked method and collect its results."""
        args = tuple(value.key if isinstance(value, Held) else value for value in args)
        kwargs = {name: value.key if isinstance(value, Held) else value for name, value in kwargs.items()}
        hold_as = HeldKey(next(self._numbers)) if collect is Collect.HOLD else None
        per_rank = rank_arguments(dispatch, args, kwargs, self.num_ranks)
        results = self._invoke_all(
            [(rank, "invoke", (role, method, own, named, hold_as)) for rank, (own, named) in enumerate(per_rank)]
        )
        if hold_as is not None:
            return Held(self, hold_as, collected(Collect.CONCAT, results))
        return collected(collect, results)

    def map_held(self, key: HeldKey, function: Callable[..., ResultT], args: tuple[Any, ...]) -> list[ResultT]:
        """function(value, *args) on every rank's own held value."""
        return self._invoke_all([(rank, "map_held", (key, function, args)) for rank in range(self.num_ranks)])

    def release(self, key: HeldKey) -> None:
        """Forget a held value on every rank."""
        self._invoke_all([(rank, "release", (key,)) for rank in range(self.num_ranks)])

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

    def _types(self) -> dict[str, type]:
        return self._worker.component_types()

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return [getattr(self._worker, method)(*args) for _, method, args in calls]

    def component(self, name: str) -> object:
        """The component itself, for tests and notebooks."""
        return self._worker.component(name)

    def close(self) -> None:
        """Nothing to stop."""
