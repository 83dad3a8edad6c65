"""Several groups of workers as one runtime: the trainer, engines and reward models on separate devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.distributed.held import Held
from unirl.distributed.pools.dealt import DealtRequests
from unirl.distributed.pools.gates import Gates
from unirl.distributed.pools.running import LentPool, RunningPool, pool_metrics, scale_pools
from unirl.distributed.pools.served import ServedPool
from unirl.distributed.runtime import Runtime
from unirl.distributed.spans import Span
from unirl.distributed.worker import ComponentInfo, Usage
from unirl.types.errors import ContractError
from unirl.types.roles import MeshPlace


class WorkerGroups(Runtime):
    """Finds every role in the group that has it: roles in `elsewhere` by name, all others in `main`.

    A held value moves, from worker to worker, to the group whose role is called with it; results of `gather` and `hold`
    are held by `main`. The groups are closed together, and then `on_close` is called.
    led: roles that several groups implement together, by name: objects in this process with the role's methods.
    pools: the groups by the names of their pools, those of `led` roles too. hosting: pools without devices, which are
        closed with them. lent: see `Runtime`.
    Raises ContractError if a group lacks its role.
    """

    def __init__(
        self,
        main: Runtime,
        elsewhere: Mapping[str, Runtime],
        *,
        led: Mapping[str, object] | None = None,
        pools: Mapping[str, Runtime] | None = None,
        hosting: Mapping[str, RunningPool] | None = None,
        lent: Sequence[LentPool] = (),
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        for name, runtime in elsewhere.items():
            if not runtime.has_role(name):
                raise ContractError(f"the workers that should hold {name!r} have {sorted(runtime._infos())}")
        self._main = main
        self._elsewhere = dict(elsewhere)
        self._led = dict(led or {})
        self._pools = dict(pools or {})
        self._hosting = dict(hosting or {})
        self.lent = lent
        self._groups = list(dict.fromkeys((main, *elsewhere.values(), *self._pools.values())))
        self._used: dict[Runtime, Usage] = {}
        self._on_close = on_close
        for runtime in self._groups:
            runtime.neighbours = frozenset(self._groups) - {runtime}

    def _role(self, name: str) -> Any:  # Any: a Role, or an object with its methods
        return self._led[name] if name in self._led else self._elsewhere.get(name, self._main).role(name)

    def has_role(self, name: str) -> bool:
        """See Runtime; true if any group has the role."""
        return name in self._led or super().has_role(name)

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """See Runtime; on the workers of `main`."""
        return self._main.gather(sources)

    def hold(self, value: Any) -> Held:  # Any: see Runtime
        """See Runtime; on the workers of `main`."""
        return self._main.hold(value)

    def read(self, paths: Sequence[Path]) -> Held:
        """See Runtime; in the store of `main`, from which it moves to whoever is called with it."""
        return self._main.read(paths)

    @property
    def num_shards(self) -> int:
        """Least common multiple of all groups' shards: multiples of it divide over the workers of every group."""
        return math.lcm(*(runtime.num_shards for runtime in self._groups))

    @property
    def is_closed(self) -> bool:
        """True if the workers of `main` are stopped. If only another group has failed, the trained state can still be
        saved."""
        return self._main.is_closed

    def usage(self) -> Usage:
        """Resources used by the workers of all groups so far; by stopped ones, what they had used when they were last
        asked, so that the rollouts before a death can be saved."""
        self._used |= {runtime: runtime.usage() for runtime in self._groups if not runtime.is_closed}
        parts = self._used.values()
        return Usage(sum(part.cpu_s for part in parts), sum(part.peak_rss_bytes for part in parts))

    def pool_metrics(self) -> dict[str, float]:
        return pool_metrics({**self._pools, **self._hosting})

    def take_spans(self) -> list[Span]:
        return [span for runtime in self._groups for span in runtime.take_spans()]

    def deal_by(self, gates: Gates) -> bool:
        engines = self._with_engines()
        if not all(isinstance(runtime, ServedPool) for runtime in engines):
            return False
        return all([runtime.deal_by(gates) for runtime in engines])

    @property
    def dealt_requests(self) -> Sequence[DealtRequests]:
        return [dealt for runtime in self._with_engines() for dealt in runtime.dealt_requests]

    def _with_engines(self) -> list[Runtime]:
        """The groups that generate."""
        if "engine" in self._led:
            return [runtime for runtime in self._groups if runtime.has_role("engine")]
        return [self._elsewhere.get("engine", self._main)]

    def scale(self, sizes: Mapping[str, int]) -> None:
        scale_pools({**self._pools, **self._hosting}, sizes)

    def num_held(self) -> int:
        """Largest number of held values in one worker."""
        return max(runtime.num_held() for runtime in self._groups)

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return {**self._main._infos(), **{name: group._infos()[name] for name, group in self._elsewhere.items()}}

    def _places(self) -> Sequence[MeshPlace]:
        return self._main._places()

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return self._main._invoke_all(calls)

    def close(self) -> None:
        """Stop the workers of all groups. Safe to call twice."""
        for runtime in self._groups:
            runtime.close()
        for pool in self._hosting.values():
            pool.close()
        self._on_close()
