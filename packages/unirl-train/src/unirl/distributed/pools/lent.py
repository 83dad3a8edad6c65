"""Members of a served pool on devices that also train: they work while training waits, and rest while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unirl.distributed.pools.cutting import Ask
from unirl.distributed.pools.served import ServedPool


class LentMembers:
    """The members of some devices of a pool, which work to begin with. Implements LentPool.

    numbers: devices of the pool. engines: names of their components.
    """

    def __init__(self, pool: ServedPool, numbers: Collection[int], engines: Sequence[str]) -> None:
        self._pool, self._numbers = pool, frozenset(numbers)
        self._engines = list(engines)

    @property
    def name(self) -> str:
        """The pool's name."""
        return self._pool.name

    @property
    def num_lent(self) -> int:
        """Members on devices that also train, at work or not."""
        return len(self._numbers & self._pool.numbers)

    @property
    def num_others(self) -> int:
        """Members that always work."""
        return self._pool.num_workers - self.num_lent

    def lend(self, *, wakes: bool) -> None:
        for engine in self._engines if wakes else ():
            self._pool.ask(self._numbers, Ask(engine, "wake_up"))
        self._pool.work(self._numbers)

    def take_back(self, *, cuts_calls: bool, sleeps: bool) -> None:
        self._pool.rest(self._numbers, [Ask(engine, "abort") for engine in self._engines] if cuts_calls else ())
        for engine in self._engines if sleeps else ():
            self._pool.ask(self._numbers, Ask(engine, "sleep"))
