"""When the calls of requests in flight begin, and with which version of the weights each did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from unirl.distributed.held import Held
from unirl.trainer.loops.order import Begun
from unirl.trainer.loops.slots import ItemT, Slot
from unirl.types.errors import ConfigError
from unirl.types.member_pool import Gate


class CallsEndedError(Exception):
    """The run ends before these calls have begun."""


@dataclass(frozen=True)
class CutRequest(Generic[ItemT]):
    """A request that a push has cut short, where the engine takes one at a time."""

    slot: Slot[ItemT]
    begun: Held


@dataclass
class _Calls:
    """The calls that the pools cut a request into."""

    versions: dict[str, list[list[int]]] = field(default_factory=dict)
    """Pool -> versions with which each call began, and went on where a push had cut it short."""
    answered: set[tuple[str, int]] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)
    """Pools whose calls an earlier run has begun."""


class CallOrder:
    """Lets calls begin while it is open, which it is between pushes. Implements `unirl.distributed.pools.gates.Gates`.

    A call runs to its end on the member that it began on, with the weights that this member had then: a push waits for
    the calls that run, and the others begin after it, also those that it has cut short.
    changed: guards all of it, and is notified when a call ends. order: request -> how it began in the run that is
    repeated; each call waits for its version, and `is_settled` for the calls of the present one.
    """

    def __init__(self, changed: threading.Condition, order: Mapping[int, Begun] | None) -> None:
        self._changed = changed
        self._order = order
        self._version = 0
        self._is_open = False
        self._is_over = False
        self._awaited: set[int] = set()
        """Requests that were admitted, and whose first calls are not known to a pool. Later ones wait for them."""
        self._num_running = 0
        self._num_untaken = 0
        """Calls that are answered, and whose pool has not kept the answer."""
        self._requests: dict[int, _Calls] = {}
        self._wakes: list[Callable[[], None]] = []

    # What the loop says -------------------------------------------------------------------------------------------

    def admit(self, request: int, begun: Mapping[str, Any] | None = None) -> None:  # Any: JSON
        """A request has been admitted; its calls follow. begun: what `state` gave of it in an earlier run."""
        own = _Calls()
        if begun is not None:
            own.versions = {pool: [list(call) for call in calls] for pool, calls in begun["versions"].items()}
            own.answered = {(pool, call) for pool, call in begun["answered"]}
            own.restored = set(own.versions)
        self._requests[request] = own
        self._awaited.add(request)

    def state(self, request: int) -> dict[str, Any]:  # Any: JSON
        """With which versions the calls of a request began and went on, and which are answered."""
        own = self._requests[request]
        return {"versions": own.versions, "answered": sorted(own.answered)}

    def finish(self, request: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        """A request is answered. Returns, by pool, the versions with which each of its calls began and went on."""
        with self._changed:
            versions = self._requests.pop(request).versions
            self._awaited.discard(request)
            self._changed.notify_all()
        self._wake()
        return {pool: tuple(tuple(call) for call in own) for pool, own in versions.items()}

    def open(self, version: int) -> None:
        """All members have the weights of this version. Call it, and `end`, without the lock: it asks the pools."""
        with self._changed:
            self._version, self._is_open = version, True
        self._wake()

    def close(self) -> None:
        """Let no call begin until `open`."""
        self._is_open = False

    def end(self) -> None:
        """Let no call begin any more; those who wait for one get CallsEndedError."""
        with self._changed:
            self._is_open, self._is_over = False, True
        self._wake()

    @property
    def is_quiet(self) -> bool:
        """True while no call runs."""
        return not self._num_running

    @property
    def are_taken(self) -> bool:
        """True if the pools have kept the answers of all calls that ran."""
        return self.is_quiet and not self._num_untaken

    @property
    def is_settled(self) -> bool:
        """True if the requests so far have no call that is to begin, or runs, with the present version."""
        return not any(self._has_due(request, calls) for request, calls in self._requests.items())

    def _has_due(self, request: int, calls: _Calls) -> bool:
        begun = None if self._order is None else self._order[request]
        if begun is None or not begun.calls:
            return True
        return any(
            version <= self._version and (pool, call) not in calls.answered
            for pool, versions in begun.calls.items()
            for call, version in enumerate(versions)
        )

    def _wake(self) -> None:
        for wake in self._wakes:
            wake()

    # What the pools ask -------------------------------------------------------------------------------------------

    def add_pool(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def of(self, request: int, pool: str, num_calls: int) -> Gate:
        """See Gates. Raises ConfigError if the request had other calls in the run that is repeated."""
        due: tuple[int, ...] | None = None
        if self._order is not None:
            begun = self._order[request]
            due = begun.calls.get(pool, ()) if begun.calls else (begun.version,) * num_calls
            if len(due) != num_calls:
                raise ConfigError(
                    f"schedule.replay has {len(due)} calls of request {request} to the pool {pool}, and this run "
                    f"{num_calls}. Set devices and samples_per_call of the pool, batch_size and "
                    "schedule.groups_per_request as in the run that wrote it."
                )
        with self._changed:
            own = self._requests[request]
            if pool in own.restored:
                own.restored.remove(pool)
            else:
                own.versions[pool] = [[] for _ in range(num_calls)]
            self._changed.notify_all()
        return _RequestGate(self, request, pool, due)

    def come(self, request: int) -> None:
        """A pool knows the calls of a request."""
        with self._changed:
            self._awaited.discard(request)
        self._wake()

    def may_begin(self, request: int, due: int | None) -> bool:
        """True if a call could begin now. due: its version, if an order is repeated."""
        is_next = not self._awaited or request <= min(self._awaited)
        return self._is_open and is_next and (due is None or due <= self._version)

    def begin(self, request: int, pool: str, call: int, due: int | None) -> bool:
        """True if the call begins now, which is noted."""
        with self._changed:
            if not self.may_begin(request, due):
                return False
            self._num_running += 1
            self._requests[request].versions[pool][call].append(self._version)
        return True

    def ended(self, request: int, pool: str, call: int, *, is_answered: bool) -> None:
        """A call is over."""
        with self._changed:
            self._num_running -= 1
            self._num_untaken += is_answered
            own = self._requests.get(request)
            if own is not None and is_answered:
                own.answered.add((pool, call))
            elif own is not None:
                own.versions[pool][call].pop()
            self._changed.notify_all()

    def taken(self, request: int) -> None:
        with self._changed:
            self._num_untaken -= 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise CallsEndedError after `end`."""
        if self._is_over:
            raise CallsEndedError


@dataclass(frozen=True)
class _RequestGate:
    """The calls of a pool for one request. Implements Gate."""

    calls: CallOrder
    request: int
    pool: str
    due: Sequence[int] | None
    """The version of each call, if an order is repeated."""

    def _due(self, number: int) -> int | None:
        return None if self.due is None else self.due[number]

    @property
    def order(self) -> int:
        return self.request

    def come(self) -> None:
        self.calls.come(self.request)

    def may_begin(self, number: int) -> bool:
        return self.calls.may_begin(self.request, self._due(number))

    def begin(self, number: int) -> bool:
        return self.calls.begin(self.request, self.pool, number, self._due(number))

    def ended(self, number: int, *, is_answered: bool) -> None:
        self.calls.ended(self.request, self.pool, number, is_answered=is_answered)

    def check(self) -> None:
        self.calls.check()
