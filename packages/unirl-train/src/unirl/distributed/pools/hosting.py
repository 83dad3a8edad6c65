"""A pool without devices: members that each host one object, such as the processes of an environment.

Members know nothing of each other and hold nothing that must survive them: who asks one finds out that it died, says
so, and asks another. So a pool only starts, replaces, counts and scales.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from unirl.types.errors import ConfigError, UniRLError, WorkerError
from unirl.types.protocols.hosting import HostedMember

logger = logging.getLogger(__name__)

_MAX_STARTS = 3
"""Processes of one member that may fail to start in a row."""
GAUGES = "gauges"
"""Method of a hosted object that gives what it did since the last call, by name; members' values are averaged where the
name ends in `_s` and added where it does not."""


class Hosting(Protocol):
    """One process of a member, as the pool sees it."""

    @property
    def member(self) -> HostedMember:
        """As those who ask it see it."""
        ...

    def is_ready(self, timeout_s: float) -> bool:
        """True if it answers within that time. Raises WorkerError if it has ended, and what making its object
        raised."""
        ...

    def stop(self, *, at_once: bool = False) -> None:
        """End it and all that it started. Safe to call twice. at_once: it does not answer, and is not asked to end."""
        ...


class LocalHosting:
    """An object in this process. Implements Hosting and HostedMember."""

    def __init__(self, key: str, make: Callable[[], Any]) -> None:  # Any: a hosted object
        self.key = self.name = key
        self._hosted = make()

    @property
    def member(self) -> HostedMember:
        return self

    def start(self, method: str, *args: Any) -> Callable[[], Any]:  # Any: as the object's methods
        future: Future[Any] = getattr(self._hosted, method)(*args)
        return future.result

    def is_ready(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    def stop(self, *, at_once: bool = False) -> None:
        del at_once
        self._hosted.close().result()


class HostedPool:
    """The members. Safe to call from several threads. Implements HostingPool.

    make: a process for a member, by its number and a name that no other process has; it starts while others are made.
    start_timeout_s: longest wait for a member, if no other one can be asked.
    """

    def __init__(
        self, name: str, make: Callable[[int, str], Hosting], num_members: int, *, start_timeout_s: float = 300.0
    ) -> None:
        self._name = name
        self._make = make
        self._start_timeout_s = start_timeout_s
        self._changing = threading.RLock()
        self._lives: Counter[int] = Counter()
        """Processes that a member has had."""
        self._failed: Counter[int] = Counter()
        """Those that failed to start since one did."""
        self._loading: set[int] = set()
        self._members: dict[int, Hosting] = {}
        self._is_closed = False
        self.num_restarts = 0
        """Processes that replaced others."""
        self.resize(num_members)

    @property
    def name(self) -> str:
        return self._name

    def require_ready(self) -> None:
        """Wait until every member can be asked. Raises what starting them raises; then all are stopped."""
        try:
            for number in list(self._members):
                self._wait_for(number)
        except UniRLError:
            self.close()
            raise

    def members(self) -> Sequence[HostedMember]:
        """See HostingPool; those that are being started are left out."""
        with self._changing:
            ready = [number for number in list(self._members) if self._is_ready(number, 0.0)]
            if not ready:
                first = min(self._members)
                self._wait_for(first)
                ready = [first]
            return [self._members[number].member for number in ready]

    def lost(self, member: HostedMember, why: str) -> None:
        with self._changing:
            number = next((number for number, own in self._members.items() if own.member.key == member.key), None)
            if number is None or self._is_closed:
                return
            logger.warning("%s of the pool %s is replaced: %s", member.name, self._name, why)
            self._replace(number)

    def resize(self, size: int) -> None:
        """Let members join or leave until there are so many. Raises ConfigError for none."""
        if size < 1:
            raise ConfigError(f"the pool {self._name} cannot be scaled to zero: it needs at least one member.")
        with self._changing:
            for number in range(len(self._members), size):
                self._start(number)
            for number in range(len(self._members) - 1, size - 1, -1):
                self._loading.discard(number)
                self._members.pop(number).stop()

    def gauges(self) -> dict[str, float]:
        """What the members did since the last call, as each says it (`GAUGES`), how many there are and were replaced so
        far. Those that do not answer are left out."""
        with self._changing:
            asked = [self._members[number] for number in list(self._members) if number not in self._loading]
            sizes = {"members": float(len(self._members)), "restarts": float(self.num_restarts)}
        found = []
        for wait in [own.member.start(GAUGES) for own in asked]:
            try:
                found.append(wait())
            except WorkerError as error:
                logger.warning("no figures of a member of the pool %s: %s", self._name, error)
        return {**_joined(found), **sizes}

    def close(self) -> None:
        """Stop all members. Safe to call twice."""
        with self._changing:
            self._is_closed = True
            for own in self._members.values():
                own.stop()

    def _start(self, number: int) -> None:
        self._members[number] = self._make(number, f"{self._name}-{number}.{self._lives[number]}")
        self._lives[number] += 1
        self._loading.add(number)

    def _replace(self, number: int) -> None:
        self._members[number].stop(at_once=True)
        self._start(number)
        self.num_restarts += 1

    def _is_ready(self, number: int, timeout_s: float) -> bool:
        """Raises WorkerError if its process ended too often before it could be asked, and what making it raised."""
        if number not in self._loading:
            return True
        try:
            is_ready = self._members[number].is_ready(timeout_s)
        except WorkerError as error:
            self._failed[number] += 1
            if self._failed[number] >= _MAX_STARTS:
                raise
            logger.warning("%s\nIt had just been started. Starting another.", error)
            self._replace(number)
            return False
        if is_ready:
            self._loading.discard(number)
            self._failed[number] = 0
        return is_ready

    def _wait_for(self, number: int) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_ready(number, max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise WorkerError(
                    self._members[number].member.name,
                    f"the pool {self._name} has no member that can be asked after {self._start_timeout_s:.0f} s. Are "
                    f"there free cores for pools.{self._name}.cpus on its nodes?",
                )


def _joined(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for own in found for name in own)
    sums = {name: sum(own[name] for own in found) for name in names}
    return {name: value / len(found) if name.endswith("_s") else value for name, value in sums.items()}
