"""What a component offers that must be closed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Closeable(Protocol):
    """Holds threads, connections or processes until it is closed."""

    def close(self) -> None:
        """Stop and release everything. Safe to call twice."""
        ...
