"""Bounds how old samples may be: what is asked for takes a slot, and keeps it until it is trained on."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from unirl.types.errors import ContractError

if TYPE_CHECKING:  # rules of recipes read this module, and import no torch
    from unirl.types.rollout import RolloutReq

ItemT = TypeVar("ItemT")
TooOld = Literal["wait", "drop", "correct"]


@dataclass
class Slot(Generic[ItemT]):
    """A request between its admission and its training."""

    number: int
    """Requests are numbered from 0 in the order of admission."""
    rollout: int
    """The rollout that it is a part of."""
    version: int
    """Version of the weights when it was admitted."""
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Pool -> version with which each call began, if they differ from `version`."""
    resumed: Sequence[int] = ()
    """Versions with which calls went on that a push had cut short."""
    num_skipped: int = 0
    """Requests right before it that an earlier run had trained on."""
    item: ItemT | None = None
    """What was made of it; None while it is being made."""
    asked: RolloutReq | None = None
    """What the engine is asked; None until its prompts are known, and where it is asked once."""
    is_dropped: bool = False
    """True if it became too old while it was made: it is asked again."""

    @property
    def versions(self) -> set[int]:
        """Those with which its samples began, and went on."""
        return ({version for own in self.calls.values() for version in own} or {self.version}) | set(self.resumed)

    def made_by(self, calls: Mapping[str, Sequence[Sequence[int]]]) -> bool:
        """Remember with which versions its calls began and went on; true if any was not `version`.

        calls: pool -> versions of each call, in their order.
        """
        self.calls = {pool: tuple(call[0] for call in own) for pool, own in calls.items()}
        self.resumed = sorted({version for own in calls.values() for call in own for version in call[1:]})
        is_mixed = self.versions != {self.version}
        if not is_mixed:
            self.calls = {}
        return is_mixed


class Slots(Generic[ItemT]):
    """Requests in flight, oldest first. Plain data: whoever shares it between threads locks.

    per_rollout: requests of one rollout, which are trained on together.
    max_staleness: versions S by which the weights that train may be newer than those that a sample began with.
    window: a rollout is made of the first finished requests among `per_rollout + window - 1`, so that with 1 requests
        are trained on in the order of admission, and else up to `window - 1` slow ones are overtaken.
    too_old: what becomes of an overtaken request that would be too old for the next rollout. "wait": it is waited for;
        "drop": others are taken, and it is admitted again when it is finished; "correct": it is overtaken
        further, and trained on at any age.

    There are (S + 1) * per_rollout slots. A request takes one when it is admitted; `free` returns those of a rollout
    when the weights trained on it are in the engine, as the next version. Requests are trained on in the order of
    admission, so one that is admitted behind at most S unfinished rollouts is trained on after at most S further
    versions: no sample is made that would be too old. With S = 0 a rollout is admitted when the one before is trained.
    Where requests are overtaken, no more than `per_rollout` can be due at once.
    """

    def __init__(self, per_rollout: int, max_staleness: int, window: int = 1, too_old: TooOld = "wait") -> None:
        if window == 1 and too_old != "wait":
            raise ContractError(f"too_old = {too_old} with a window of 1, in which nothing becomes too old")
        if per_rollout < 1 or max_staleness < 0 or not 1 <= window <= per_rollout:
            raise ContractError(
                f"{per_rollout} requests per rollout, {max_staleness} versions, a window of {window}: need >= 1, >= 0 "
                "and at most a rollout"
            )
        self.per_rollout = per_rollout
        self.max_staleness = max_staleness
        self.window = window
        self.too_old: TooOld = too_old
        self._waited: set[int] = set()
        self._again: deque[Slot[ItemT]] = deque()
        self.num_dropped = 0
        """Requests dropped so far."""
        self.version = 0
        """Version of the weights that the engine has."""
        self._slots: list[Slot[ItemT]] = []
        self._taken: list[Slot[ItemT]] = []
        """The requests of the rollout that is trained on."""
        self._next = 0
        self._ahead: frozenset[int] = frozenset()

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return (self.max_staleness + 1) * self.per_rollout

    @property
    def num_mixed(self) -> int:
        """Earlier rollouts whose requests one may be trained on with."""
        return 0 if self.window == 1 else self.max_staleness if self.too_old == "wait" else sys.maxsize

    @property
    def next_request(self) -> int:
        """Number of the request that is admitted next."""
        return next(number for number in itertools.count(self._next) if number not in self._ahead)

    @property
    def num_missing(self) -> int:
        """Requests that training has to wait for at least, before the rollout behind that of `oldest` is there."""
        taken = {slot.number for slot in self._taken}
        finished = sum(slot.item is not None and slot.number not in taken for slot in self._slots)
        return max(0, self.per_rollout - finished)

    @property
    def num_waiting(self) -> int:
        """Finished requests."""
        return sum(slot.item is not None for slot in self._slots)

    def start(self, rollout: int, *, first: int | None = None, ahead: Collection[int] = ()) -> None:
        """Begin with a rollout, whose version the engine has.

        first: the oldest request that is not trained on, if that is of an earlier rollout. ahead: later ones that are.
        """
        self._next, self.version = rollout * self.per_rollout if first is None else first, rollout
        self._ahead = frozenset(ahead)

    def admit(self, until: int) -> Slot[ItemT] | None:
        """The slot of the next request, first of those that were dropped; None if all are taken, or it would belong to
        rollout `until`."""
        if self._again:
            slot = self._again.popleft()
            slot.version, slot.is_dropped, slot.calls, slot.resumed = self.version, False, {}, ()
            return slot
        number = self.next_request
        if len(self._slots) == self.capacity or number >= until * self.per_rollout:
            return None
        slot = Slot[ItemT](number, number // self.per_rollout, self.version, num_skipped=number - self._next)
        self._next = number + 1
        self._slots.append(slot)
        return slot

    @property
    def dropped(self) -> Sequence[Slot[ItemT]]:
        """Requests that were dropped, which are admitted again next."""
        return self._again

    @property
    def untrained(self) -> list[Slot[ItemT]]:
        """Requests that are neither trained on nor of the rollout that `oldest` gave, oldest first."""
        return [slot for slot in self._slots if slot not in self._taken]

    def restore(self, slot: Slot[ItemT]) -> None:
        """Take a request back that an earlier run admitted: after `start`, in the order of their numbers. One that was
        dropped is admitted again."""
        self._next = slot.number + 1
        self._slots.append(slot)
        if slot.is_dropped:
            self._again.append(slot)

    def oldest(self, wanted: Collection[int] | None = None) -> list[Slot[ItemT]] | None:
        """The requests of the next rollout, oldest first; None if they are not finished. Raises ContractError if one is
        too old.

        wanted: their numbers, if an order is repeated.
        """
        if wanted is None:
            found = self._first_finished()
        else:
            found = [slot for slot in self._slots if slot.number in wanted]
        if len(found) < self.per_rollout or any(slot.item is None for slot in found):
            return None
        self._drop_expired()
        for slot in found if self.too_old != "correct" else ():
            if self.version - slot.version > self.max_staleness:
                raise ContractError(
                    f"request {slot.number} began at version {slot.version} and would be trained on at {self.version}, "
                    f"more than {self.max_staleness} later"
                )
        self._taken = found
        return found

    def finished(self, number: int) -> ItemT | None:
        """What was made of a request that is not trained on; None as long as it is not finished."""
        return next((slot.item for slot in self._slots if slot.number == number), None)

    def _first_finished(self) -> list[Slot[ItemT]]:
        """Requests of the next rollout, fewer if that many are not finished; some may not be, which are waited for."""
        expired = self._expired()
        window = [slot for slot in self._slots if slot not in expired][: self.per_rollout + self.window - 1]
        due = [slot for slot in window if self.too_old != "correct" and self._is_due(slot)]
        if self.window > 1:
            self._waited.update(slot.number for slot in due if slot.item is None)
        others = [slot for slot in window if slot not in due and slot.item is not None]
        return sorted([*due, *others][: self.per_rollout], key=lambda slot: slot.number)

    def _is_due(self, slot: Slot[ItemT]) -> bool:
        """True if it would be too old for the rollout after the next one."""
        return self.version - slot.version >= self.max_staleness

    def _expired(self) -> list[Slot[ItemT]]:
        """Requests that are not waited for."""
        return [slot for slot in self._slots if self.too_old == "drop" and slot.item is None and self._is_due(slot)]

    def _drop_expired(self) -> None:
        """The next rollout is made without them."""
        for slot in self._expired():
            self.num_dropped += not slot.is_dropped
            slot.is_dropped = True

    def finish(self, slot: Slot[ItemT], item: ItemT | None) -> ItemT | None:
        """Hand in what was made of a request; returns it, or None if the request was dropped and is admitted again."""
        if slot.is_dropped:
            self._again.append(slot)
            return None
        slot.item = item
        return item

    def take_too_old(self) -> dict[str, float]:
        """How many requests that were too old, or about to be, were waited for since the last call, dropped so far,
        and are trained on in this rollout."""
        waited, self._waited = self._waited, set()
        late = sum(self.version - slot.version > self.max_staleness for slot in self._taken)
        return {
            "schedule/too_old/waited": float(len(waited)),
            "schedule/too_old/dropped": float(self.num_dropped),
            "schedule/too_old/corrected": float(late),
        }

    @property
    def num_overtaken(self) -> int:
        """Requests older than the newest of the rollout that is trained on, and not in it."""
        return sum(slot.number < self._taken[-1].number for slot in self._slots) - len(self._taken) + 1

    def free(self) -> None:
        """Return the slots of the rollout that `oldest` gave: the weights trained on it are the next version."""
        taken = {slot.number for slot in self._taken}
        self._slots = [slot for slot in self._slots if slot.number not in taken]
        self._taken = []
        self.version += 1

    def clear(self) -> list[ItemT]:
        """Return all slots; gives what was made and not trained on."""
        left = [slot.item for slot in self._slots if slot.item is not None]
        self._slots.clear()
        return left
