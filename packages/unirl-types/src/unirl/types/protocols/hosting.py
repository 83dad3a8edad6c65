"""Pools without devices, as those who ask them see them: members that host one object each, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class HostedMember(Protocol):
    """One member, in its present process."""

    @property
    def key(self) -> str:
        """Names this member and its process; no other one ever has it."""
        ...

    @property
    def name(self) -> str:
        """As messages call it."""
        ...

    def start(self, method: str, *args: Any) -> Callable[[], Any]:  # Any: as the object's methods
        """Call a method of the object, which gives a future; returns a function that waits for the future's result.

        That function raises WorkerError if the process died or gives no sign of life, and what the method raised if
        that is another UniRLError.
        """
        ...


class HostingPool(Protocol):
    """The members. Pickles if they stand in other processes."""

    @property
    def name(self) -> str:
        """Its key in `pools`."""
        ...

    def members(self) -> Sequence[HostedMember]:
        """Those that can be asked now, at least one. Raises WorkerError if none starts."""
        ...

    def lost(self, member: HostedMember, why: str) -> None:
        """Say that a member died or hangs. It is ended and another process replaces it, once for each `key`."""
        ...
