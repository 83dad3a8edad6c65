"""What a run does with any of its pools: count and scale them, and lend devices to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from unirl.types.errors import ConfigError


class CountedPool(Protocol):
    """A pool of workers, or one without devices."""

    def gauges(self) -> dict[str, float]:
        """What its members did since the last call, and how many there are and were replaced so far."""
        ...

    def resize(self, size: int) -> None:
        """Let members join or leave. Raises ConfigError for a size that the pool cannot have."""
        ...


class RunningPool(CountedPool, Protocol):
    """A pool without devices, started by the run and closed with it."""

    def close(self) -> None:
        """Stop all members. Safe to call twice."""
        ...


class LentPool(Protocol):
    """A pool of engines with members on devices that also train, see `unirl.distributed.pools.lent.LentMembers`."""

    @property
    def name(self) -> str:
        """The pool's name."""
        ...

    @property
    def num_lent(self) -> int:
        """Members on devices that also train, at work or not."""
        ...

    @property
    def num_others(self) -> int:
        """Members that always work."""
        ...

    def lend(self, *, wakes: bool) -> None:
        """Let the members on these devices work again. A push has to follow before anything is asked of them.

        wakes: engines take the memory back that `take_back` gave away.
        """
        ...

    def take_back(self, *, cuts_calls: bool, sleeps: bool) -> None:
        """Ask them for nothing more, wait for the end of their calls, and let their engines give memory back.

        cuts_calls: calls end early, and other members continue them. sleeps: engines give memory back.
        """
        ...


def pool_metrics(pools: Mapping[str, CountedPool]) -> dict[str, float]:
    """What pools did since the last call, as `perf/pool/<name>/...`."""
    return {f"perf/pool/{name}/{what}": value for name, pool in pools.items() for what, value in pool.gauges().items()}


def scale_pools(pools: Mapping[str, CountedPool], sizes: Mapping[str, int]) -> None:
    """`resize` of pools by name. Raises ConfigError for a pool that is not there."""
    unknown = sorted(set(sizes) - set(pools))
    if unknown:
        there = ", ".join(pools) or "none"
        raise ConfigError(f"{', '.join(unknown)}: there are no such pools; there are {there}.")
    for name, size in sizes.items():
        pools[name].resize(size)
