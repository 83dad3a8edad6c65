"""Bounds how old samples may be: what is asked for takes a slot, and keeps it until it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from unirl.types.errors import ContractError

ItemT = TypeVar("ItemT")


@dataclass
class Slot(Generic[ItemT]):
    """A request between its admission and its training."""

    number: int
    """Requests are numbered from 0 in the order of admission."""
    rollout: int
    """The rollout that it is a part of."""
    version: int
    """Version of the weights when it was admitted."""
    newest: int = 0
    """Newest version with which any of its calls began."""
    item: ItemT | None = None
    """What was made of it; None while it is being made."""


class Slots(Generic[ItemT]):
    """Requests in flight, oldest first. Plain data: whoever shares it between threads locks.

    per_rollout: requests of one rollout, which are trained on together.
    max_staleness: versions S by which the weights that train may be newer than those that a sample began with.

    There are (S + 1) * per_rollout slots. A request takes one when it is admitted; `free` returns those of a rollout
    when the weights trained on it are in the engine, as the next version. Requests are trained on in the order of
    admission, so one that is admitted behind at most S unfinished rollouts is trained on after at most S further
    versions: no sample is made that would be too old. With S = 0 a rollout is admitted when the one before is trained.
    """

    def __init__(self, per_rollout: int, max_staleness: int) -> None:
        if per_rollout < 1 or max_staleness < 0:
            raise ContractError(f"{per_rollout} requests per rollout, {max_staleness} versions: need >= 1 and >= 0")
        self.per_rollout = per_rollout
        self.max_staleness = max_staleness
        self.version = 0
        """Version of the weights that the engine has."""
        self._slots: list[Slot[ItemT]] = []
        self._next = 0

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return (self.max_staleness + 1) * self.per_rollout

    @property
    def next_request(self) -> int:
        """Number of the request that is admitted next."""
        return self._next

    @property
    def num_waiting(self) -> int:
        """Finished requests."""
        return sum(slot.item is not None for slot in self._slots)

    def start(self, rollout: int) -> None:
        """Begin with a rollout, whose version the engine has."""
        self._next, self.version = rollout * self.per_rollout, rollout

    def admit(self, until: int) -> Slot[ItemT] | None:
        """The slot of the next request; None if all are taken, or it would belong to rollout `until`."""
        if len(self._slots) == self.capacity or self._next == until * self.per_rollout:
            return None
        slot: Slot[ItemT] = Slot(self._next, self._next // self.per_rollout, self.version, self.version)
        self._next += 1
        self._slots.append(slot)
        return slot

    def oldest(self) -> list[Slot[ItemT]] | None:
        """The requests of the oldest rollout; None if some are not finished. Raises ContractError if one is too old."""
        first = self._slots[: self.per_rollout]
        if len(first) < self.per_rollout or any(slot.item is None for slot in first):
            return None
        for slot in first:
            if self.version - slot.version > self.max_staleness:
                raise ContractError(
                    f"request {slot.number} began at version {slot.version} and would be trained on at {self.version}, "
                    f"more than {self.max_staleness} later"
                )
        return first

    def free(self) -> None:
        """Return the slots of the oldest rollout: the weights trained on it are the engine's next version."""
        del self._slots[: self.per_rollout]
        self.version += 1

    def clear(self) -> list[ItemT]:
        """Return all slots; gives what was made and not trained on."""
        left = [slot.item for slot in self._slots if slot.item is not None]
        self._slots.clear()
        return left
