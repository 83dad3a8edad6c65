"""Several groups of workers as one runtime: what trains, engines and reward models each with devices of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.distributed.worker import ComponentInfo, Usage
from unirl.types.errors import ContractError
from unirl.types.roles import MeshPlace


class WorkerGroups(Runtime):
    """Finds every role with the workers that hold it: those of `elsewhere` by name, the others with `main`.

    A held value moves, from worker to worker, to the group whose role is called with it; `gather` and `hold` give their
    results to `main`. The groups are closed together, and `on_close` is called after them.
    led: roles that several groups play together, by name: objects of this process with the methods of the role.
    Raises ContractError where a group lacks its role.
    """

    def __init__(
        self,
        main: Runtime,
        elsewhere: Mapping[str, Runtime],
        *,
        led: Mapping[str, object] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        for name, runtime in elsewhere.items():
            if not runtime.has_role(name):
                raise ContractError(f"the workers that should hold {name!r} have {sorted(runtime._infos())}")
        self._main = main
        self._elsewhere = dict(elsewhere)
        self._led = dict(led or {})
        self._groups = list(dict.fromkeys((main, *elsewhere.values())))
        self._on_close = on_close
        for runtime in self._groups:
            runtime.neighbours = frozenset(self._groups) - {runtime}

    def _role(self, name: str) -> Any:  # Any: a Role, or what plays one
        return self._led[name] if name in self._led else self._elsewhere.get(name, self._main).role(name)

    def has_role(self, name: str) -> bool:
        """See Runtime; of any group."""
        return name in self._led or super().has_role(name)

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """See Runtime; on the workers of `main`."""
        return self._main.gather(sources)

    def hold(self, value: Any) -> Held:  # Any: see Runtime
        """See Runtime; on the workers of `main`."""
        return self._main.hold(value)

    @property
    def num_shards(self) -> int:
        """A number of samples that divides by it divides over the workers of every group."""
        return math.lcm(*(runtime.num_shards for runtime in self._groups))

    @property
    def is_closed(self) -> bool:
        """Whether the workers of `main` are; where another group has failed, what trained can still be saved."""
        return self._main.is_closed

    def usage(self) -> Usage:
        """What the workers of all groups used so far."""
        parts = [runtime.usage() for runtime in self._groups]
        return Usage(sum(part.cpu_s for part in parts), sum(part.peak_rss_bytes for part in parts))

    def num_held(self) -> int:
        """How many held values the busiest worker keeps."""
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
        self._on_close()
