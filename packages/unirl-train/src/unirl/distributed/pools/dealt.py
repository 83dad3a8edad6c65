"""What the calls of requests in a served pool have given so far, so that a later run need not make them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.distributed.pools.shelf import Store
from unirl.types.rollout import RolloutReq, RolloutResp

Bounds = list[tuple[int, int]]
"""Rows of each call that a request is cut into: (start, stop)."""


@dataclass
class Dealt:
    """How a request was cut into calls, and what these have given."""

    bounds: Bounds
    given: dict[int, tuple[RolloutResp, Any]] = field(default_factory=dict)  # Any: the store's own
    """Call -> metadata of its samples, and these in the store. Samples that were cut short are parts."""
    request: RolloutReq | None = None
    """None: an earlier run has made a part of one that has not come."""

    @property
    def unfinished(self) -> list[int]:
        """Calls to make, or to continue."""
        return [call for call in range(len(self.bounds)) if not self.is_made(call)]

    def is_made(self, call: int) -> bool:
        """True if a call has given all of its samples."""
        if call not in self.given:
            return False
        meta = self.given[call][0]
        return not meta.num_unfinished if self.request is None else self.request.is_answered_by(meta)


class DealtRequests:
    """The requests that a pool is making. A request of several stages may be dealt here several times.

    pool: its name. store: of the pool.
    """

    def __init__(self, pool: str, store: Store) -> None:
        self.name = pool
        self._store = store
        self._requests: dict[int, list[Dealt]] = {}
        self._begun: dict[int, deque[Dealt]] = {}
        """What an earlier run has made of requests that come."""

    def begin(self, number: int, request: RolloutReq, bounds: Callable[[], Bounds]) -> Dealt:
        """A request comes. bounds: how it is cut, if no earlier run has cut it."""
        begun = self._begun.get(number)
        dealt = begun.popleft() if begun else Dealt(bounds())
        dealt.request = request
        self._requests.setdefault(number, []).append(dealt)
        return dealt

    def is_waiting(self, request: int) -> bool:
        """True if a request has calls that are to be made, or continued."""
        dealt = self._all_of(request)
        return bool(dealt and dealt[-1].unfinished)

    def forget(self, request: int) -> None:
        """A request is made."""
        self._requests.pop(request, None)
        self._begun.pop(request, None)

    def write(self, request: int, folder: Path, name: str) -> dict[str, Any]:  # Any: JSON
        """Write what the calls of a request have given to files `NAME-...` of a folder that all workers share. Called
        while no call runs; returns what `read` needs. Raises ContractError for what no file can hold."""
        found = []
        for time, dealt in enumerate(self._all_of(request)):
            calls = sorted(dealt.given)
            self._store.write([dealt.given[call][1] for call in calls], self._files(folder, name, time, calls))
            found.append({"bounds": dealt.bounds, "calls": calls})
        return {self.name: found} if found else {}

    def read(self, request: int, folder: Path, name: str, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Read what `write` wrote: when the request comes, these calls are not made again."""
        self._begun[request] = deque(
            Dealt(
                [(start, stop) for start, stop in dealt["bounds"]],
                dict(zip(calls, self._store.read(self._files(folder, name, time, calls)), strict=True)),
            )
            for time, dealt in enumerate(state.get(self.name, []))
            for calls in [dealt["calls"]]
        )

    def _all_of(self, request: int) -> list[Dealt]:
        return [*self._requests.get(request, []), *self._begun.get(request, ())]

    def _files(self, folder: Path, name: str, time: int, calls: Sequence[int]) -> list[Path]:
        return [folder / f"{name}-{self.name}-{time}-{call:05d}.safetensors" for call in calls]
