"""A pool of workers that is served: each call goes to the member that is free, and members join, leave and die.

The workers of an *even* group (`unirl.distributed.runtime.Runtime`) each get an equal share of every call, and one that
dies ends the run. Members of a *served* pool know nothing of each other. A request is cut into calls of whole groups of
samples, the same calls whatever happens to members; what a member makes leaves it at once, so that its death costs the
calls that it had not answered, which go to the others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from unirl.distributed.dispatch import HeldKey, collected
from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.held import Future, Held
from unirl.distributed.pools.cutting import Ask, RequestCutter
from unirl.distributed.pools.dealt import Dealt, DealtRequests
from unirl.distributed.pools.gates import Gates
from unirl.distributed.pools.shelf import Shelf, Store
from unirl.distributed.runtime import Runtime
from unirl.distributed.spans import Span
from unirl.distributed.worker import ComponentInfo, Usage
from unirl.types.errors import ConfigError, ContractError, WorkerError
from unirl.types.member_pool import OPEN, Gate, Member, MemberPool
from unirl.types.roles import Collect, Dispatch, MeshPlace
from unirl.types.rollout import RolloutReq, RolloutResp

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 4
"""Times that all members may die of one call to all of them."""

USAGE, BEAT = "usage", "num_held"
"""Methods of the member's own `Worker`, asked by their name."""


class WorkerMember(Member, Protocol):
    """A worker with the components of the pool. It is asked an `Ask`, or a method of its `Worker` by name."""

    def infos(self) -> Mapping[str, ComponentInfo]:
        """Role name -> what is known of its component; waits until they are built."""
        ...

    def take_busy_s(self) -> float:
        """Seconds in which the pool had asked it something, since the last call."""
        ...

    def take_spans(self) -> list[Span]:
        """When the pool had asked it something, since the last call."""
        ...

    def remote_role(self, name: str) -> RemoteRole:
        """A component of the worker, for code in workers of other groups."""
        ...


class ServedPool(Runtime):
    """The members of a pool as a runtime.

    make: the member of a device of the pool, by its number; it loads while others are made. num_members: to begin with.
    num_devices: most members. rows_per_call: samples of one call at least, whole groups; None: two calls per device.
    restored: gives a member that has just started the present weights, and proves them; set by what pushes.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], WorkerMember],
        num_members: int,
        store: Store,
        *,
        num_devices: int,
        rows_per_call: int | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.restored: Callable[[WorkerMember], None] = lambda member: None
        self._make = make
        self._store = store
        self._num_devices = num_devices
        self._cutter = RequestCutter(store, rows_per_call, num_devices)
        self._gates: Gates | None = None
        self._dealt_requests = DealtRequests(name, store)
        self._shelf = Shelf(store)
        self._check_size(num_members)
        self._members = {number: make(number) for number in range(num_members)}
        """Device of the pool -> its member."""
        members = list(self._members.values())
        try:
            self._known = members[0].infos()
        except BaseException:
            for member in members:
                member.stop()
            raise
        self._pool = MemberPool(members, lambda member: self.restored(member))

    # Members ------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[WorkerMember]:
        """Those of now, living or not yet known to be dead."""
        return self._pool.members

    @property
    def numbers(self) -> frozenset[int]:
        """Devices of the pool that have a member."""
        return frozenset(self._members)

    @property
    def working(self) -> Sequence[WorkerMember]:
        """Members that get calls, and are pushed to."""
        return self._pool.working

    def rest(self, numbers: Collection[int], ends_calls: Sequence[Ask] = ()) -> None:
        """Give the members of some devices no more calls, nor pushes, until `work`. Returns when none of theirs runs.

        ends_calls: control methods that end calls early, which others then continue; none: they run to their ends.
        """
        self._pool.rest(self._of(numbers), ends_calls)

    def work(self, numbers: Collection[int]) -> None:
        """Give members calls again that rested. The next push brings them the present weights."""
        self._pool.work(self._of(numbers))

    def ask(self, numbers: Collection[int], ask: Ask) -> None:
        """Call a method of the living members of some devices, and wait for it."""
        self._pool.broadcast(ask, self._of(numbers))

    def _of(self, numbers: Collection[int]) -> list[WorkerMember]:
        return [member for number, member in self._members.items() if number in numbers]

    def resize(self, size: int) -> None:
        """Let members join or leave until there are so many. One that joins works once it has the present weights.

        Raises ConfigError for no members and for more than devices, and what proving a member raises: then it does not
        join, and the others continue.
        """
        self._check_size(size)
        while self.num_workers < size:
            number = min(set(range(self._num_devices)) - set(self._members))
            member = self._make(number)
            self._pool.join(member)
            self._members[number] = member
            logger.info("%s joined the pool %s, which has %d members", member.name, self.name, self.num_workers)
        while self.num_workers > size:
            number, member = max(self._members.items(), key=lambda item: item[0])
            self._pool.leave(member)
            del self._members[number]
            logger.info("%s left the pool %s, which has %d members", member.name, self.name, self.num_workers)

    def _check_size(self, size: int) -> None:
        if not 1 <= size <= self._num_devices:
            what = "cannot be scaled to zero: it needs at least one member" if size < 1 else "has fewer devices"
            raise ConfigError(
                f"the pool {self.name} {what}. {size} members are asked for, it has {self._num_devices} devices."
            )

    def heal(self) -> None:
        """Return when every member is known to live, and those that replaced dead ones are restored."""
        self._pool.broadcast(BEAT)
        self._pool.heal()

    def has_lost_members(self) -> bool:
        """True if a member is dead, which is asked of each."""
        self._pool.broadcast(BEAT)
        return not all(member.is_alive for member in self.working)

    # Calls --------------------------------------------------------------------------------------------------------

    def deal_by(self, gates: Gates) -> bool:
        """See Runtime; calls of requests with a number begin as the gates say."""
        self._gates = gates
        gates.add_pool(self._pool.wake)
        return True

    def _gate(self, request: RolloutReq, num_calls: int) -> Gate:
        if request.number is None:
            return OPEN
        if self._gates is None:
            raise ContractError(f"request {request.number} has a number, and the pool {self.name} no gates")
        return self._gates.of(request.number, self.name, num_calls)

    def submit(
        self,
        role: str,
        method: str,
        dispatch: Dispatch,
        collect: Collect,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Future[Any]:
        """See Runtime. DP_SCATTER is dealt in calls, RANK_ZERO asks one member, BROADCAST all of them."""
        if self.is_closed:
            raise ContractError(f"the pool {self.name} is closed: close() was called")
        if dispatch is Dispatch.SCATTER:
            raise ContractError(f"{role}.{method} has an item per shard; members of the pool {self.name} are no shards")
        if dispatch is Dispatch.DP_SCATTER:
            return Future(lambda: self._dealt(role, method, collect, args, dict(kwargs)))
        ask = Ask(role, method, args, kwargs)
        return Future(lambda: self._one(ask) if dispatch is Dispatch.RANK_ZERO else collected(collect, self._all(ask)))

    def control(
        self, role: str, method: str, collect: Collect, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Future[None]:
        """Call a control method on all living members. Answers are not waited for: a member may die of its call."""
        self._pool.post(Ask(role, method, args, kwargs))
        return Future(lambda: None)

    def _one(self, ask: Ask) -> Any:  # Any: as the component's method
        return next(answer for _, answer in self._pool.answers([0], lambda _: ask, lambda answer: answer))

    def _all(self, ask: Ask | str) -> list[Any]:  # Any: as the component's method
        for _ in range(_MAX_ROUNDS):
            if answers := self._pool.broadcast(ask):
                return answers
            self._pool.heal()
        raise WorkerError(self.name, f"no member survived {ask}")

    def _dealt(
        self, role: str, method: str, collect: Collect, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # Any: as the component's method
        """Calls of whole groups, each to the member that is free; what they give in the order of the samples."""
        request = next((value for value in (*args, *kwargs.values()) if isinstance(value, RolloutReq)), None)
        if request is None:
            raise ContractError(f"{role}.{method} names no request to cut, so a served pool cannot deal it")
        is_held = collect is Collect.HOLD
        dealt = self._begun(request) if is_held else Dealt(self._cutter.bounds(request))
        asks = self._cutter.asks(Ask(role, method, args, kwargs, is_stored=is_held), dealt.bounds)

        def ask(call: int) -> Ask:
            if call not in dealt.given:
                return asks[call]
            kwargs = {**asks[call].kwargs, "begun": self._store.joined([dealt.given[call][1]])}
            return dataclasses.replace(asks[call], kwargs=kwargs)

        def go_on(call: int, answer: Any) -> Ask | None:  # Any: as the component's method, or in the store
            dealt.given[call] = answer
            if self._gates is not None and request.number is not None:
                self._gates.taken(request.number)
            # Without gates, who asked goes on with it: nothing would hold the call up until the push.
            return ask(call) if is_held and request.number is not None and not dealt.is_made(call) else None

        if todo := dealt.unfinished:
            gate = self._gate(request, len(asks))
            for _ in self._pool.answers(todo, ask, lambda answer: answer, gate=gate, go_on=go_on):
                pass
        found = [dealt.given[call] for call in range(len(asks))]
        if not is_held:
            return collected(collect, found)
        key = HeldKey(next(self._numbers))
        self._shelf.keep(key, [stored for _, stored in found])
        return Held(self, key, [meta for meta, _ in found])

    def _begun(self, request: RolloutReq) -> Dealt:
        if request.number is None:
            return Dealt(self._cutter.bounds(request))
        return self._dealt_requests.begin(request.number, request, lambda: self._cutter.bounds(request))

    @property
    def dealt_requests(self) -> Sequence[DealtRequests]:
        return [self._dealt_requests]

    # Held values, which lie in the store --------------------------------------------------------------------------

    def hold(self, value: RolloutResp) -> Held:
        """See Runtime; in one piece."""
        key = HeldKey(next(self._numbers))
        self._shelf.keep(key, [self._store.put(value)])
        return Held(self, key, [value.metadata_only()])

    def pick_rows(self, calls: Sequence[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:  # Any: see Runtime
        return self._shelf.pick_rows(calls)

    def map_held(
        self, key: HeldKey, function: Callable[..., Any], shard_args: Sequence[tuple[Any, ...]]
    ) -> list[Any]:  # Any: what the function gives
        """See Runtime and `Shelf.map_held`."""
        return self._shelf.map_held(key, function, shard_args)

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """Not of a served pool: WorkerGroups gathers on the workers that train."""
        raise ContractError(
            f"members of the pool {self.name} hold nothing between calls; gather where it is trained on"
        )

    def write(self, key: HeldKey, paths: Sequence[Path]) -> None:
        self._shelf.write(key, paths)

    def release(self, key: HeldKey) -> None:
        """Forget a value."""
        self._shelf.release(key)

    def num_held(self) -> int:
        """Values in the store."""
        return len(self._shelf)

    # What a runtime is asked besides -------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """What the living members used so far."""
        parts = self._pool.broadcast(USAGE)
        return Usage(sum(part.cpu_s for part in parts), sum(part.peak_rss_bytes for part in parts))

    def gauges(self) -> dict[str, float]:
        """What members did since the last call: `busy_s` of a member on average, and how many there are and were
        replaced so far."""
        busy_s = sum(member.take_busy_s() for member in self.members) / self.num_workers
        return {"busy_s": busy_s, "members": float(self.num_workers), "restarts": float(self._pool.num_restarts)}

    def take_spans(self) -> list[Span]:
        """See Runtime; a lane per member."""
        return [span for member in self.members for span in member.take_spans()]

    @property
    def num_shards(self) -> int:
        """1: calls need not be equal, so any number of samples divides."""
        return 1

    @property
    def num_workers(self) -> int:
        """Members of now."""
        return len(self.members)

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self._known

    def _places(self) -> Sequence[MeshPlace]:
        return (MeshPlace(),)

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        raise ContractError(f"members of the pool {self.name} have no ranks")

    def close(self) -> None:
        """Stop every member. Safe to call twice."""
        if not self.is_closed:
            self._is_closed = True
            self._shelf.clear()
            self._pool.stop()
