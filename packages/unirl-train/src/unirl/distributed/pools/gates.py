"""When the calls of requests may begin in served pools: decided for the whole run, asked by each pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from unirl.types.member_pool import Gate


class Gates(Protocol):
    """The gates of all requests with a number."""

    def of(self, request: int, pool: str, num_calls: int) -> Gate:
        """The gate of the calls that a pool cuts a request into. Asked once per request and pool, before they begin."""
        ...

    def taken(self, request: int) -> None:
        """The pool has kept what an answered call gave."""
        ...

    def add_pool(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever gates may have opened."""
        ...
