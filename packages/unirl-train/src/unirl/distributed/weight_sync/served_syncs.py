"""The role `sync` where engines are members of served pools: pushes survive members that die, and restore those that
start later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.pools.served import ServedPool, WorkerMember
from unirl.types.copies import Copies
from unirl.types.errors import UniRLError

logger = logging.getLogger(__name__)

POLL_S = 0.5
_MAX_PUSHES = 8
"""Times that a push is begun because members died of it or during it."""


@dataclass(frozen=True)
class PushedPool:
    """A served pool that a policy is pushed to."""

    pool: ServedPool
    engine: str
    """Name of the component."""
    shares_device: bool = False
    """True if its members are on the device of what trains, see `WeightSync.connect_elsewhere`."""
    policy: str | None = None
    """Where the sync is of several policies, the one that goes there."""


class ServedSyncs:
    """Leads the syncs of what trains, from the driver.

    sync: the role of the components that push (`WeightSync`, or `PolicySyncs`). A push goes to all members of all
    pools that do not rest, and begins again without those that died; a member that starts later gets the last push
    alone, with all that proves it, as long as the weights are still those. Once they have been trained on, it waits for
    the next push, so that all members sample with one version, unless none of its pool lives meanwhile.
    """

    def __init__(
        self,
        sync: Any,  # Any: a Role, whose methods follow its markers
        pools: Sequence[PushedPool],
    ) -> None:
        self._sync = sync
        self._pools = list(pools)
        self._connected: dict[int, tuple[WorkerMember | int, ...]] = {}
        """Pool -> its members and their processes, as the syncs know them."""
        self._last: tuple[Copies] | None = None
        """The copies that were pushed last; None: nothing was, or a push is under way."""
        self._restoring = threading.Lock()
        self._is_outdated = False
        """True from the beginning of training to the next push."""
        self._next_push = threading.Event()
        self._waiting: set[WorkerMember] = set()
        """Members that wait for the next push."""
        for pushed in self._pools:
            pushed.pool.restored = lambda member, pushed=pushed: self._restore(pushed, member)

    def prepare(self) -> None:
        self._surviving(self._sync.prepare)

    def push(self, policy: Copies = None) -> dict[str, float]:
        """Push to the members of all pools, of which those that died are replaced first."""
        self._last = None
        self._next_push.set()
        metrics = self._surviving(lambda: self._sync.push(policy))
        self._last, self._is_outdated = (policy,), False
        return metrics

    def training_begins(self) -> None:
        """What trains no longer has the weights that were pushed last. Returns when no member is being restored."""
        with self._restoring:
            self._is_outdated = True
            self._next_push.clear()

    def _surviving(self, work: Callable[[], Any]) -> Any:  # Any: what the work gives
        """The work on all members; again where some died, with others instead of them."""
        for attempt in range(1, _MAX_PUSHES + 1):
            for pushed in self._pools:
                pushed.pool.heal()
                self._connect(pushed, pushed.pool.working)
            try:
                return work()
            except UniRLError as error:
                lost = [pushed.pool.name for pushed in self._pools if pushed.pool.has_lost_members()]
                if not lost or attempt == _MAX_PUSHES:
                    raise
                logger.warning("members of %s died in a push, which begins again: %s", ", ".join(lost), error)
        raise AssertionError  # the last attempt returns or raises

    def _restore(self, pushed: PushedPool, member: WorkerMember) -> None:
        """Push what was pushed last to one member, and prove it there."""
        if self._is_outdated and self._comes_with_a_push(pushed.pool, member):
            return
        with self._restoring:
            last = self._last
            if last is None:
                return  # the push that is under way, or the first one, brings it
            self._connect(pushed, [member], keeps_former=True)  # the others may still read what was pushed to them
            if pushed.policy is None:
                self._sync.push(*last)
            else:
                self._sync.push(*last, only=pushed.policy)

    def _comes_with_a_push(self, pool: ServedPool, member: WorkerMember) -> bool:
        """Wait for the next push, which brings the weights; False if no other member lives to do the work meanwhile."""
        if member not in pool.members:
            return True  # it joins between two requests, before a push
        self._waiting.add(member)
        try:
            return self._is_pushed_to_all(pool, member)
        finally:
            self._waiting.discard(member)

    def _is_pushed_to_all(self, pool: ServedPool, member: WorkerMember) -> bool:
        while not self._next_push.wait(POLL_S):
            if not any(other.is_alive for other in pool.working if other not in self._waiting):
                self._waiting.discard(member)  # the others wait for this one, or for the push
                logger.warning(
                    "no member of %s has the weights that were pushed last; %s gets newer ones", pool.name, member.name
                )
                return False
            if not member.is_alive:  # the pool ends
                return True
        return True

    def _connect(self, pushed: PushedPool, members: Sequence[WorkerMember], *, keeps_former: bool = False) -> None:
        found = tuple(each for member in members for each in (member, member.pid))
        if self._connected.get(id(pushed)) != found:
            engines = RemoteRole.joined([member.remote_role(pushed.engine) for member in members])
            own = () if pushed.policy is None else (pushed.policy,)
            self._sync.connect_elsewhere(engines, pushed.shares_device, *own, keeps_former=keeps_former)
            self._connected[id(pushed)] = found
