"""The hybrid loop: the asynchronous one, whose devices that train generate while training waits for samples.

    training ends -> lend -> push -> training waits: all engines generate -> take back -> train: the others generate
                      |                                                        |
          engines take their memory back,               no new calls, those that run end early,
          the optimizer leaves the device               engines give their memory back

Devices are lent where that saves more time than it takes, as measured in this run (`Lending.pays_off`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.distributed.pools.running import LentPool
from unirl.trainer.collector import ScoredGroups
from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.loops.slots import Slot
from unirl.types.errors import ContractError

_NEWEST = 0.5
"""Weight of the newest measurement in what is expected."""
_FADES = 0.9
"""Factor of the expected cost for every rollout in which it was not measured, so that it is measured again."""


@dataclass(frozen=True)
class Handover:
    """How devices change hands. cuts_calls, sleeps: see `LentPool.take_back`.

    leave, come: what else moves off the device while it is lent, and back.
    """

    cuts_calls: bool
    sleeps: bool
    leave: Callable[[], object] = lambda: None
    come: Callable[[], object] = lambda: None


class Lending:
    """Lends the members of pools that stand on devices of what trains, and takes them back. They are lent to begin
    with, since their engines have just started."""

    def __init__(self, pools: Sequence[LentPool], handover: Handover, now_s: Callable[[], float] | None = None) -> None:
        if not pools:
            raise ContractError("no pool has members on devices that train, so there is nothing to lend")
        self._pools, self._handover, self._now_s = list(pools), handover, now_s or time.monotonic
        self._is_lent, self._num_resting = True, 0
        self._begun_s = 0.0
        self._work_s: float | None = None
        """Expected seconds of waiting of a rollout, times the members that work meanwhile."""
        self._switch_s: float | None = None
        """Expected seconds of lending and taking back."""
        self._spent_s = 0.0
        """Seconds of this rollout's switches so far."""
        self._metrics: dict[str, float] = {}

    @property
    def _num_lent(self) -> int:
        return sum(pool.num_lent for pool in self._pools)

    @property
    def _num_others(self) -> int:
        return sum(pool.num_others for pool in self._pools)

    @property
    def saved_s(self) -> float:
        """Seconds that training is expected to wait less for the next rollout if devices are lent: W / o - W / (o + l)
        for a work W, o members that always work and l that may be lent."""
        lent, others = self._num_lent, self._num_others
        work_s = self._work_s or 0.0
        return work_s / others - work_s / (others + lent) if others else float("inf")

    @property
    def pays_off(self) -> bool:
        """True if lending is expected to save more time than it takes. What it takes is measured the first time."""
        return self.saved_s > (self._switch_s or 0.0)

    def begin(self, *, is_due: bool) -> bool:
        """Called before a push. Lend if that pays off; returns True if members have just begun to work, which then need
        the push. is_due: whether training has to wait for the next rollout at all."""
        self._spent_s = 0.0
        if self._is_lent:
            return False
        if not (is_due and self.pays_off):
            if self._num_lent != self._num_resting:  # some have joined
                self._take_back()
            return False
        begun_s = self._now_s()
        self._handover.leave()
        for pool in self._pools:
            pool.lend(wakes=self._handover.sleeps)
        self._is_lent = True
        self._spent_s = self._now_s() - begun_s
        return True

    def waits(self) -> None:
        """Training begins to wait for samples."""
        self._begun_s = self._now_s()

    def end(self) -> None:
        """The samples are there. Take back what is lent, and note what was measured."""
        waited_s, was_lent, saved_s = self._now_s() - self._begun_s, self._is_lent, self.saved_s
        if was_lent:
            self._take_back()
            self._switch_s = _expected(self._switch_s, self._spent_s)
        elif self._switch_s is not None:
            self._switch_s *= _FADES
        working = self._num_others + (self._num_lent if was_lent else 0)
        self._work_s = _expected(self._work_s, waited_s * working)
        self._metrics = {
            "schedule/hybrid/lent": float(was_lent),
            "schedule/hybrid/wait_s": waited_s,
            "schedule/hybrid/switch_s": self._spent_s,
            **({"schedule/hybrid/saved_s": saved_s} if saved_s < float("inf") else {}),
        }

    def _take_back(self) -> None:
        begun_s = self._now_s()
        for pool in self._pools:
            pool.take_back(cuts_calls=self._handover.cuts_calls, sleeps=self._handover.sleeps)
        self._handover.come()
        self._is_lent, self._num_resting = False, self._num_lent
        self._spent_s += self._now_s() - begun_s

    def metrics(self) -> dict[str, float]:
        """What was measured in the last rollout."""
        return self._metrics


def _expected(before: float | None, newest: float) -> float:
    return newest if before is None else _NEWEST * newest + (1 - _NEWEST) * before


class HybridTrainer(AsyncTrainer):
    """Lends devices while it waits for samples. lending: what is lent, and when. Others: see `AsyncTrainer`."""

    def __init__(self, *args: Any, lending: Lending, **parts: Any) -> None:  # Any: as AsyncTrainer
        super().__init__(*args, **parts)
        self._lending = lending

    def _before_push(self) -> None:
        super()._before_push()
        with self._threads.changed:
            is_due = self._slots.num_missing > 0
        if self._lending.begin(is_due=is_due):
            self._learner.forget_push()

    def _oldest(self, rollout_id: int) -> list[Slot[ScoredGroups]]:
        self._lending.waits()
        slots = super()._oldest(rollout_id)
        self._lending.end()
        return slots

    def _loop_metrics(self, slots: Sequence[Slot[ScoredGroups]], num_samples: int) -> dict[str, float]:
        return {**super()._loop_metrics(slots, num_samples), **self._lending.metrics()}
