"""How long the rollouts of a schedule take, from the seconds of its parts: slots and turns as in the asynchronous loop,
on a clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unirl.trainer.loops.slots import Slot, Slots
from unirl.types.errors import ContractError

SPREAD = 0.3
"""Sigma of the log-normal factor of single calls: how much longer one takes than another."""
NUM_ROLLOUTS = 200


@dataclass(frozen=True)
class Durations:
    """Mean seconds of a rollout in each part."""

    engine_s: float
    reward_s: float
    train_s: float
    push_s: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """What became of some rollouts."""

    ends_s: tuple[float, ...]
    """When each was trained on, in seconds since the start."""
    worked_s: Mapping[str, float]
    """Seconds in which engine, reward and learner worked, pushes included."""
    mean_s: Mapping[str, float]
    """Mean seconds of a rollout in each."""

    @property
    def step_s(self) -> float:
        """Seconds of a rollout: those of the part that works most, over its share. So it does not depend on how the
        calls of this run were drawn."""
        most = max(self.worked_s, key=lambda part: self.worked_s[part])
        return self.mean_s[most] / self.share(most)

    def share(self, part: str) -> float:
        """The share of all the time in which a part worked."""
        return self.worked_s[part] / self.ends_s[-1]


def forecast(
    durations: Durations,
    *,
    per_rollout: int,
    max_staleness: int,
    spread: float = SPREAD,
    is_pipelined: bool = False,
    num_rollouts: int = NUM_ROLLOUTS,
    seed: int = 0,
) -> Forecast:
    """A run of the asynchronous loop whose engine and reward take one request at a time.

    per_rollout: requests of one. is_pipelined: each is trained on before the next ones are there. Raises ContractError
    for no rollouts, and for what `Slots` refuses.
    """
    if num_rollouts < 1:
        raise ContractError(f"{num_rollouts} rollouts say nothing of a schedule; ask for 1 at least")
    slots = Slots[float](per_rollout, max_staleness)
    return _Run(durations, slots, spread, num_rollouts, seed, is_pipelined=is_pipelined).forecast()


class _Run:
    """The parts, and what happens next. Whatever has happened, every part that can begin something does."""

    def __init__(
        self,
        durations: Durations,
        slots: Slots[float],
        spread: float,
        num_rollouts: int,
        seed: int,
        *,
        is_pipelined: bool,
    ) -> None:
        self._durations = durations
        self._slots = slots
        self._spread = spread
        self._num_rollouts = num_rollouts
        self._is_pipelined = is_pipelined
        self._num_trained = 0
        """Requests trained on, where they are one after the other."""
        self._draws = {name: random.Random(seed + i) for i, name in enumerate(("engine", "reward", "learner"))}  # noqa: S311 - a simulation
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._unscored: deque[Slot[float]] = deque()
        self._busy: set[str] = set()
        self._awaits_push = True
        """True from the end of training to the push that follows; the engine begins nothing."""
        self._ends_s: list[float] = []
        self._worked_s = dict.fromkeys(self._draws, 0.0)

    def forecast(self) -> Forecast:
        """Run to the end."""
        self._slots.start(0)
        self._begin()
        while len(self._ends_s) < self._num_rollouts:
            self._now_s, _, then = heapq.heappop(self._events)
            then()
            self._begin()
        own = self._durations
        mean_s = {"engine": own.engine_s, "reward": own.reward_s, "learner": own.train_s + own.push_s}
        return Forecast(tuple(self._ends_s), self._worked_s, mean_s)

    def _begin(self) -> None:
        if "learner" not in self._busy:
            if self._awaits_push and "engine" not in self._busy:
                self._work("learner", self._durations.push_s, self._pushed, is_drawn=False)
            elif self._is_pipelined:
                if self._slots.finished(self._num_trained) is not None:
                    self._work("learner", self._durations.train_s / self._slots.per_rollout, self._part_trained)
            elif not self._awaits_push and self._slots.oldest() is not None:
                self._work("learner", self._durations.train_s, self._trained)
        if "engine" not in self._busy and not self._awaits_push:
            slot = self._slots.admit(until=self._num_rollouts)
            if slot is not None:
                self._work("engine", self._durations.engine_s / self._slots.per_rollout, lambda: self._made(slot))
        if "reward" not in self._busy and self._unscored:
            scored = self._unscored.popleft()
            self._work("reward", self._durations.reward_s / self._slots.per_rollout, lambda: self._scored(scored))

    def _work(self, part: str, mean_s: float, then: Callable[[], None], *, is_drawn: bool = True) -> None:
        factor = self._draws[part].lognormvariate(-(self._spread**2) / 2, self._spread) if is_drawn else 1.0
        self._busy.add(part)
        self._worked_s[part] += mean_s * factor

        def ended() -> None:
            self._busy.remove(part)
            then()

        heapq.heappush(self._events, (self._now_s + mean_s * factor, next(self._numbers), ended))

    def _pushed(self) -> None:
        if self._ends_s:
            self._slots.free()
        self._awaits_push = False
        self._begin()

    def _made(self, slot: Slot[float]) -> None:
        self._unscored.append(slot)

    def _scored(self, slot: Slot[float]) -> None:
        slot.item = self._now_s

    def _part_trained(self) -> None:
        self._num_trained += 1
        if self._num_trained % self._slots.per_rollout == 0:
            self._slots.oldest()  # whose slots the push gives back
            self._trained()

    def _trained(self) -> None:
        self._ends_s.append(self._now_s)
        self._awaits_push = True
