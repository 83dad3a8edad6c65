"""Requests in flight: admitted, and not trained on. Where each is, and which one the engine begins next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unirl.distributed.held import Held
from unirl.trainer.collector import ScoredGroups
from unirl.trainer.loops.calls import CallOrder, CutRequest
from unirl.trainer.loops.order import Begun, OrderLog, is_due
from unirl.trainer.loops.slots import Slot, Slots


@dataclass
class Flight:
    """Requests in flight. Plain data: whoever shares it between threads locks.

    calls: of served pools, which a request is made known to when it is admitted, if `is_shared`. until: the rollout
    before which requests are admitted. log, order: see `unirl.trainer.loops.order`.
    """

    slots: Slots[ScoredGroups]
    calls: CallOrder
    until: int
    log: OrderLog | None = None
    order: Mapping[int, Begun] | None = None
    is_shared: bool = False
    """True if the engine takes several requests at once, whose calls begin as `calls` says."""
    cut: deque[CutRequest[ScoredGroups]] = field(default_factory=deque)
    """Requests that a push has cut short, which go on first."""
    asked: deque[tuple[Slot[ScoredGroups], Mapping[str, Any] | None]] = field(default_factory=deque)  # Any: JSON
    """Requests that an earlier run has asked for, and what it said of their calls (`CallOrder.state`)."""
    unscored: deque[tuple[Slot[ScoredGroups], Held]] = field(default_factory=deque)
    """Samples without rewards."""

    def begun_or_admitted(self) -> tuple[Slot[ScoredGroups], CutRequest[ScoredGroups] | None] | None:
        """The request that the engine makes next, and what there is of it; None if there is none."""
        if self.cut:
            cut = self.cut.popleft()
            return cut.slot, cut
        slot = self.admitted()
        return None if slot is None else (slot, None)

    def admitted(self) -> Slot[ScoredGroups] | None:
        """The slot of the next request, if there is one and its time has come."""
        begun = None
        if self.asked:
            slot, begun = self.asked.popleft()
        else:
            slot = self.slots.admit(until=self.until) if self.is_next_due() else None
        if slot is not None and self.is_shared:
            self.calls.admit(slot.number, begun)
        return slot

    def is_next_due(self) -> bool:
        """True if an order that is repeated begins the next request with the present version, or there is none."""
        return self.order is None or is_due(self.order, self.slots.next_request, self.slots.version)

    def calls_of(self, slot: Slot[ScoredGroups]) -> Mapping[str, Any] | None:  # Any: JSON
        """`CallOrder.state` of a request that served pools are making, or have made a part of."""
        waiting = [begun for own, begun in self.asked if own is slot]
        return waiting[0] if waiting else self.calls.state(slot.number)

    def is_parked(self, slot: Slot[ScoredGroups]) -> bool:
        """True if a request is where it is between two parts of its way, and in no call."""
        waiting = [*(own for own, _ in self.unscored), *(own.slot for own in self.cut), *(own for own, _ in self.asked)]
        return slot.item is not None or slot in self.slots.dropped or any(own is slot for own in waiting)

    def note(self, slot: Slot[ScoredGroups], trained: int | None = None) -> None:
        """Write down how a request begins. trained: the rollout that it is trained on with, if that is not its own."""
        if self.log is not None:
            self.log.begun(slot, trained)

    def release(self) -> None:
        """Free all samples, and forget the requests."""
        for left in (*self.slots.clear(), *(own for _, own in self.unscored), *(own.begun for own in self.cut)):
            left.release()
        self.unscored.clear()
        self.asked.clear()
        self.cut.clear()
