"""Roles and runtimes: the trainer calls `role.method(...)`, and the runtime decides where it runs.

A runtime has a number of workers. Each worker builds the same named components; a role is one name on all of them.
Methods carry `@distributed` markers (`unirl.types.roles`), which say how arguments are split and results returned. A
held result stays with the workers that made it (`unirl.distributed.held`).
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from unirl.distributed.dispatch import HeldKey, collected, scatter, shard_arguments, shard_ranks
from unirl.distributed.gathering import new_shards
from unirl.distributed.held import Future, Held
from unirl.distributed.pools.dealt import DealtRequests
from unirl.distributed.pools.gates import Gates
from unirl.distributed.pools.running import LentPool, RunningPool, pool_metrics, scale_pools
from unirl.distributed.spans import Span
from unirl.distributed.worker import Builder, ComponentInfo, Usage, Worker, WorkerContext
from unirl.types.errors import ConfigError, ContractError, UniRLError
from unirl.types.roles import Collect, Dispatch, MeshPlace
from unirl.types.rollout import RolloutResp
from unirl.types.storage import load_rollout, save_rollout

ResultT = TypeVar("ResultT")
RoleT = TypeVar("RoleT")


class Submitter:
    """`role.submit.method(...)` returns a future; `role.method(...)` waits."""

    def __init__(self, runtime: Runtime, name: str, info: ComponentInfo) -> None:
        self._runtime = runtime
        self._name = name
        self._info = info

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        marker = self._info.methods.get(method)
        if marker is None:
            raise AttributeError(
                f"{self._info.owner}.{method} is not marked with @distributed, so a runtime cannot call it; "
                f"marked are {sorted(self._info.methods)}"
            )

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            if marker.is_control:
                return self._runtime.control(self._name, method, marker.collect, args, kwargs)
            return self._runtime.submit(self._name, method, marker.dispatch, marker.collect, args, kwargs)

        return call


def _write(resp: RolloutResp, path: Path) -> None:
    save_rollout(path, resp)


class Role:
    """One component name on all workers. `role.method(...)` follows the method's marker.

    submit: `role.submit.method(...)` does not wait; it returns a `Future`. Workers answer one call at a time, in the
    order of submission, so a call that follows a submitted one on the same workers waits for it. Control methods are
    the exception: they are answered while another call runs, and may be called from any thread.
    """

    def __init__(self, runtime: Runtime, name: str, info: ComponentInfo) -> None:
        if "submit" in info.methods:
            raise ContractError(
                f"{info.owner}.submit is marked with @distributed, but role.submit is the runtime's own"
            )
        self.submit = Submitter(runtime, name, info)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        submit = getattr(self.submit, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            return submit(*args, **kwargs).result()

        return call


class Runtime(ABC):
    """Calls components on workers. Use it as a context manager: leaving it stops every worker.

    Work is split into `num_shards` shards, one per data-parallel place. Workers that share a place (sequence, tensor or
    expert parallel) get the same shard, and the first of them answers.
    """

    neighbours: frozenset[Runtime] = frozenset()
    """Other runtimes of the run. Their held values move here when a role of this runtime is called with them."""
    lent: Sequence[LentPool] = ()
    """Pools of engines with members on devices that also train."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True if the workers have been stopped."""
        return self._is_closed

    @abstractmethod
    def _infos(self) -> Mapping[str, ComponentInfo]:
        """Role name -> facts about its component."""

    @abstractmethod
    def _places(self) -> Sequence[MeshPlace]:
        """Mesh place of each worker, by rank."""

    @abstractmethod
    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        """Run worker methods, given (rank, worker method, arguments); results in the same order."""

    def _start(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> Callable[[], list[Any]]:
        """Start worker methods; returns a function that waits for their results. In this base class nothing starts
        before that."""
        return lambda: self._invoke_all(calls)

    def _pick(self, calls: list[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:
        """Rows of held values, given (rank, key, rows): the rows, or references that `_assemble` of such a runtime can
        read."""
        return self._invoke_all([(rank, "pick", (key, rows)) for rank, key, rows in calls])

    def _assemble(self, calls: list[tuple[int, tuple[Any, ...], list[Any]]]) -> list[RolloutResp]:
        """Join pieces on every rank, given (rank, first arguments of `Worker.assemble`, arrived rows)."""
        return self._invoke_all([(rank, "assemble", (*args, arrived)) for rank, args, arrived in calls])

    @abstractmethod
    def close(self) -> None:
        """Stop every worker. Safe to call twice."""

    @property
    def num_shards(self) -> int:
        """Number of equal shards of a batch, which is the number of data-parallel places."""
        return self._places()[0].dp_size

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._places())

    @overload
    def role(self, name: str) -> Role: ...
    @overload
    def role(self, name: str, seen_as: type[RoleT]) -> RoleT: ...
    def role(self, name: str, seen_as: type[RoleT] | None = None) -> Any:  # Any: seen_as, whose methods a Role has
        """The component `name` on all workers. Raises ConfigError for an unknown name.

        seen_as: the protocol of the driver's calls to it (`unirl.trainer.roles`), for type checkers.
        """
        return self._role(name)

    def _role(self, name: str) -> Any:  # Any: a Role, or what plays one
        infos = self._infos()
        if name not in infos:
            raise ConfigError(f"no component is called {name!r}; there are {sorted(infos)}")
        return Role(self, name, infos[name])

    def has_role(self, name: str) -> bool:
        """True if the workers have a component of that name."""
        return name in self._infos()

    def submit(
        self,
        role: str,
        method: str,
        dispatch: Dispatch,
        collect: Collect,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Future[Any]:
        """Call one marked method; the future collects its results."""
        if dispatch is Dispatch.RANK_ZERO and collect is Collect.HOLD:
            raise ContractError(f"{role}.{method}: a held value lies with every worker, RANK_ZERO makes it on one")
        ready = tuple(self._key_of(value) for value in args)
        named = {name: self._key_of(value) for name, value in kwargs.items()}
        hold_as = HeldKey(next(self._numbers)) if collect is Collect.HOLD else None
        per_shard = shard_arguments(dispatch, ready, named, self.num_shards)
        if dispatch is Dispatch.RANK_ZERO:
            ((own, own_named),) = per_shard
            wait = self._start([(0, "invoke", (role, method, own, own_named, hold_as, True))])
        else:
            wanted = [shard == 0 or collect is not Collect.FIRST for shard in range(self.num_shards)]
            wait = self._start_shards(
                "invoke", [(role, method, own, own_named, hold_as) for own, own_named in per_shard], wanted
            )

        def finish() -> Any:
            if hold_as is None:
                return collected(collect, wait())
            with self._unless_it_fails(hold_as):
                return Held(self, hold_as, wait())

        return Future(finish)

    def control(
        self, role: str, method: str, collect: Collect, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        """Call a control method on all workers, which do not wait for the call that they are in."""
        wait = self._start_control((role, method, args, dict(kwargs), None))
        return Future(lambda: collected(collect, wait()))

    def _start_control(self, args: tuple[Any, ...]) -> Callable[[], list[Any]]:
        """Start `Worker.invoke` with these arguments on every rank, while another call may run there."""
        return lambda: self._invoke_all([(rank, "invoke", args) for rank in range(self.num_workers)])

    @contextlib.contextmanager
    def _unless_it_fails(self, key: HeldKey) -> Generator[None]:
        """Context: if some workers fail, release what the others hold under the key."""
        try:
            yield
        except UniRLError:
            if not self.is_closed:
                self.release(key)
            raise

    def _start_shards(
        self, method: str, shard_args: Sequence[tuple[Any, ...]], wanted: Sequence[bool] | None = None
    ) -> Callable[[], list[Any]]:
        """Start a worker method on every rank with the arguments of its shard, and as last argument whether its result
        is wanted. Returns a function that waits for the results of each shard's first rank (None if not `wanted`)."""
        ranks = shard_ranks(self._places())
        wait = self._start(
            [
                (rank, method, (*args, rank == own[0] and (wanted is None or wanted[shard])))
                for shard, (own, args) in enumerate(zip(ranks, shard_args, strict=True))
                for rank in own
            ]
        )
        per_shard = len(ranks[0])
        return lambda: wait()[::per_shard]

    def map_held(
        self, key: HeldKey, function: Callable[..., ResultT], shard_args: Sequence[tuple[Any, ...]]
    ) -> list[ResultT]:
        """function(value, *args) on every worker's share of a held value, with the args of its shard; one result per
        shard."""
        return self._start_shards("map_held", [(key, function, args) for args in shard_args])()

    def hold(self, value: RolloutResp) -> Held:
        """Split a response over the workers and hold it there. Rarely needed, since results usually stay where they are
        made."""
        key = HeldKey(next(self._numbers))
        shards = scatter(value, self.num_shards)
        return Held(self, key, self._start_shards("hold", [(key, shard) for shard in shards])())

    def write(self, key: HeldKey, paths: Sequence[Path]) -> None:
        """See `Held.write`; the first rank of each shard writes."""
        ranks = shard_ranks(self._places())
        self._invoke_all(
            [(own[0], "map_held", (key, _write, (path,), False)) for own, path in zip(ranks, paths, strict=True)]
        )

    def read(self, paths: Sequence[Path]) -> Held:
        """A value that `Held.write` has written, held where `Held.landed` would put it.

        Raises FileNotFoundError for a missing file, and DataError for one that is damaged.
        """
        return self.hold(RolloutResp.concat([load_rollout(path)[0] for path in paths]))

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """A new held value with samples of others, split evenly over these workers. sources: (value, rows) in order.

        Equal to `hold(RolloutResp.concat([held.fetch().select(rows) for held, rows in sources]))`, but rows go from
        worker to worker and the driver only passes references. Workers of other runtimes of the same kind may hold the
        sources, which stay held. `reward_compute_s` is the largest over the shards that the rows came from.
        Raises ContractError if a sample is chosen twice or does not exist, or the samples do not divide over the
        shards.
        """
        shards = new_shards(sources, self, self.num_shards)
        hold_as = HeldKey(next(self._numbers))
        ranks = shard_ranks(self._places())
        with self._unless_it_fails(hold_as):
            answers = self._assemble(
                [
                    (rank, (hold_as, shard.own, shard.order), shard.arrived)
                    for own, shard in zip(ranks, shards, strict=True)
                    for rank in own
                ]
            )
            metas = answers[:: len(ranks[0])]
            collected(Collect.CONCAT, metas)  # raises if the shards do not fit together
        return Held(self, hold_as, metas)

    def pick_rows(self, calls: Sequence[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:
        """See `unirl.distributed.held.Holder`; the first rank of each shard answers."""
        first = [own[0] for own in shard_ranks(self._places())]
        return self._pick([(first[shard], key, rows) for shard, key, rows in calls])

    def usage(self) -> Usage:
        """Resources used so far by the workers, and by the driver if it is a separate process."""
        parts = self._invoke_all([(rank, "usage", ()) for rank in range(self.num_workers)])
        return Usage(sum(part.cpu_s for part in parts), sum(part.peak_rss_bytes for part in parts))

    def release(self, key: HeldKey) -> None:
        """Free a held value on every worker."""
        self._invoke_all([(rank, "release", (key,)) for rank in range(self.num_workers)])

    def landed(self, held: Held) -> Held:
        """See `Held.landed`; here it stays where it is."""
        return held

    @property
    def dealt_requests(self) -> Sequence[DealtRequests]:
        """What the calls of requests with a number have given so far, of each served pool with engines."""
        return []

    def gauges(self) -> dict[str, float]:
        """What these workers did since the last call, for `pool_metrics` of a run with several pools."""
        return {}

    def take_spans(self) -> list[Span]:
        """When these workers were asked something, since the last call; empty where that is the driver's own work."""
        return []

    def resize(self, size: int) -> None:
        """Let a served pool have so many members. Raises ConfigError for workers of an even pool."""
        raise ConfigError(
            f"{size} members are asked for, but these workers are an even pool, whose size is the recipe's. Only "
            "served pools are scaled (pools.<name>.served)."
        )

    def deal_by(self, gates: Gates) -> bool:
        """Let gates say when the calls of requests with a number begin. False, and nothing has changed, if engines take
        one request at a time: they are not all in served pools."""
        return False

    def scale(self, sizes: Mapping[str, int]) -> None:
        """`resize` of pools by name. Raises ConfigError for a pool that is not there."""
        raise ConfigError(f"{', '.join(sizes)}: there are no such pools; all workers of this run stand together.")

    def pool_metrics(self) -> dict[str, float]:
        """What pools of workers did since the last call, as `perf/pool/<name>/...`; empty where all stand together."""
        return {}

    def num_held(self) -> int:
        """Largest number of held values in one worker; it grows if values are not released."""
        return max(self._invoke_all([(rank, "num_held", ()) for rank in range(self.num_workers)]))

    def _key_of(self, value: Any) -> Any:
        if not isinstance(value, Held):
            return value
        if value.is_landed or value.runtime in self.neighbours:
            value.move_to(self)
        return value.key_for(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LocalRuntime(Runtime):
    """One worker in this process: no Ray, no copies. hosting: pools without devices, which are closed with it."""

    def __init__(
        self, builder: Builder, *, device: str = "cpu", hosting: Mapping[str, RunningPool] | None = None
    ) -> None:
        super().__init__()
        self._hosting = dict(hosting or {})
        self._worker = Worker(builder, WorkerContext(rank=0, world_size=1, device=device))

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self._worker.component_infos()

    def _places(self) -> Sequence[MeshPlace]:
        return (self._worker.mesh_place,)

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        if self.is_closed:
            raise ContractError("this runtime is closed: close() was called")
        return [getattr(self._worker, method)(*args) for _, method, args in calls]

    def component(self, name: str) -> object:
        """The component itself, for tests and notebooks."""
        return self._worker.component(name)

    def close(self) -> None:
        """Close the components that hold threads or connections."""
        self._is_closed = True
        self._worker.close()
        for pool in self._hosting.values():
            pool.close()

    def scale(self, sizes: Mapping[str, int]) -> None:
        if not self._hosting:
            super().scale(sizes)
        scale_pools(self._hosting, sizes)

    def pool_metrics(self) -> dict[str, float]:
        return pool_metrics(self._hosting)
