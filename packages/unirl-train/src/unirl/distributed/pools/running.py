"""What a run does with any of its pools: count and scale them."""

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
