"""The asynchronous loop: engine, reward and training work at the same time, each in a thread of the driver.

    engine                           reward                       training
    ------                           ------                       --------
    wait for a slot                                               push version v, return the slots of rollout v - 1
    generate a request  -----------> score it, refill ----------> wait for all requests of the oldest rollout
    (goes on with the next)          (goes on with the next)      advantages over the whole, train, evaluate, save

Slots (`unirl.trainer.loops.slots`) bound how far the engine is ahead: with `max_staleness: 0` a rollout is asked for
when the one before is trained on, and the run has the bits of the synchronous loop. New weights reach the engine
between two of its requests; served pools of engines, which have several requests at once, between two calls of their
members (`unirl.trainer.loops.calls`). An evaluation has engine and reward to itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from unirl.train.checkpoint.sample_files import IN_FLIGHT
from unirl.trainer.asking import RequestOf
from unirl.trainer.base import Trainer
from unirl.trainer.collector import ScoredGroups
from unirl.trainer.loops.calls import CallOrder, CutRequest
from unirl.trainer.loops.flight import Flight
from unirl.trainer.loops.gauges import LoopGauges, span_metrics
from unirl.trainer.loops.in_flight import InFlight, State
from unirl.trainer.loops.order import Begun, OrderLog, requests_of
from unirl.trainer.loops.part_threads import PartThreads
from unirl.trainer.loops.slots import Slot, Slots, TooOld
from unirl.trainer.settings import TrainerSettings
from unirl.types.heartbeat import Activity
from unirl.types.rollout import RolloutReq


class AsyncTrainer(Trainer):
    """Trains on rollouts that are collected ahead, at most `max_staleness` versions old.

    groups_per_request: prompts of one request; None: all of a rollout. window, too_old: see `Slots`.
    requests_at_once: of served pools, at most; None: all that have a slot. A repeated order takes what it needs.
    cuts_calls: a push does not wait for the calls that run: they end early, and go on after it.
    log, order: write down, and repeat, how requests and calls begin; see `unirl.trainer.loops.order`.
    in_flight: makes what writes requests in flight into checkpoints; None: a resumed run makes them again.
    Other arguments: see `Trainer`. What a thread raises, the run raises.
    """

    _takes_left_over: ClassVar[bool] = True

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        max_staleness: int,
        groups_per_request: int | None = None,
        window: int = 1,
        too_old: TooOld = "wait",
        requests_at_once: int | None = None,
        cuts_calls: bool = False,
        log: OrderLog | None = None,
        order: Mapping[int, Begun] | None = None,
        in_flight: Callable[..., InFlight] | None = None,
        **parts: Any,  # Any: as Trainer
    ) -> None:
        super().__init__(settings, **parts)
        self._groups_per_request = groups_per_request or settings.batch_size
        self._order, self._cuts_calls = order, cuts_calls
        self._gauges, self._threads = LoopGauges(), PartThreads()
        """`changed` of the threads guards what follows."""
        per_rollout = settings.batch_size // self._groups_per_request
        self._slots: Slots[ScoredGroups] = Slots(per_rollout, max_staleness, window, too_old)
        most = self._slots.capacity
        self._requests_at_once = most if order is not None else min(requests_at_once or most, most)
        self._calls = CallOrder(self._threads.changed, order)
        self._flight = Flight(self._slots, self._calls, settings.num_rollouts, log, order)
        self._in_flight = None if in_flight is None else in_flight(self.collector, self._groups_per_request)
        self._left: State | None = None
        """Requests in flight of the run that is resumed."""
        self._admitting = threading.Lock()
        """Held by the thread that asks for the next prompts."""

    def step(self, rollout_id: int) -> dict[str, float]:
        """Push, and train on the oldest rollout; returns its metrics."""
        pushed = self._pushed(rollout_id)
        slots = self._oldest(rollout_id)
        with self._gauges.busy["learner"].call(), self._clock.about(rollout=rollout_id):
            groups = [slot.item for slot in slots if slot.item is not None]
            rollout = self.collector.ready(rollout_id, groups, show=self._shows(rollout_id))
            spans = span_metrics(rollout.resp.meta) if self._cuts_calls else {}
            oldest = min(version for slot in slots for version in slot.versions)
            trained = self._learned(rollout, [slot.number for slot in slots], oldest)
        return {**rollout.metrics, **pushed, **trained, **spans, **self._loop_metrics(slots, rollout.num_samples)}

    def _pushed(self, rollout_id: int) -> dict[str, float]:
        """Push the weights between two requests, and give the slots of the rollout before back; returns metrics."""
        self._hold_up("engine", before=rollout_id)
        with self._gauges.busy["learner"].call(), self.collector.engine_in_use:
            self._before_push()
            pushed = self._learner.push(rollout_id, self.collector.rollout_policy)
        with self._threads.change():
            if rollout_id > self._slots.version:
                self._slots.free()
            self._threads.let_go()
        self._calls.open(self._slots.version)
        return pushed

    def _before_push(self) -> None:
        self._record.scale_pools()

    def _loop_metrics(self, slots: Sequence[Slot[ScoredGroups]], num_samples: int) -> dict[str, float]:
        with self._threads.changed:
            own = self._gauges.take(self._slots, slots, num_samples)
        return {**self._clock.step_metrics(), **self._record.pool_metrics(), **own}

    def _loop(self) -> None:
        left = self.collector.asking.left_over
        if left is None:
            self._slots.start(self._done)
        else:
            left.require(self._groups_per_request)
            self._slots.start(self._done, first=left.oldest, ahead=left.ahead)
        self._gauges.start()
        is_shared = self._flight.is_shared = self.collector.deal_by(self._calls)
        if self._in_flight is not None and self._left is not None:
            self._in_flight.restore(self._done, self._left, self._flight)
        generate = [self._generate_among_others] * self._requests_at_once if is_shared else [self._generate]
        self._threads.start([*(("engine", each) for each in generate), ("reward", self._score)])
        try:
            super()._loop()
        finally:
            self._threads.end()
            self._calls.end()
            if self._cuts_calls and self._threads.failure is None:
                self._cut_short()
            self._threads.join()
            self._flight.release()

    def _samples(self) -> tuple[dict[str, Any], dict[str, Sequence[str]]]:
        state, files = super()._samples()
        if self._in_flight is None or self._threads.is_over:
            return state, files
        self._hold_up("engine", "reward", before=self._done)
        kept, flight = self._in_flight, self._flight
        self._threads.wait("the answers of calls", lambda: self._calls.are_taken and kept.is_settled(flight))
        state[IN_FLIGHT], files[IN_FLIGHT] = kept.write(self._done, flight)
        return state, files

    def _goes_on(self, in_flight: Mapping[str, Any]) -> bool:
        self._left = None if self._in_flight is None else in_flight
        return self._left is not None

    def _evaluate(self, done: int) -> dict[str, float]:
        self._hold_up("engine", "reward", before=done)
        return super()._evaluate(done)

    def _compare(self, done: int) -> dict[str, float]:
        self._hold_up("engine", "reward", before=done)
        return super()._compare(done)

    # Threads of engine and reward ---------------------------------------------------------------------------------

    def _generate(self, activity: Activity) -> bool:
        found = self._threads.next("engine", self._flight.begun_or_admitted)
        if found is None:
            return False
        slot, cut = found
        if cut is not None:
            slot.resumed = (*slot.resumed, self._slots.version)
        self._flight.note(slot)
        with self._threads.request("engine", *self._during("engine", slot, activity)):
            req = slot.asked = slot.asked or self._asked(slot)
            resp = self.collector.made(req, None if cut is None else cut.begun)
        with self._threads.change():
            if req.is_answered_by(resp.meta):
                self._flight.unscored.append((slot, resp))
            else:
                self._flight.cut.append(CutRequest(slot, resp))
        return True

    def _generate_among_others(self, activity: Activity) -> bool:
        """As `_generate`, where other threads do the same: prompts are asked for in the order of the requests."""
        with self._admitting:
            slot = self._threads.next("engine", self._flight.admitted)
            if slot is None:
                return False
            self._flight.note(slot)
            with self._threads.request("engine", *self._during("engine", slot, activity)):
                req = slot.asked = slot.asked or self._asked(slot).replace(number=slot.number)
        busy, doing, about = self._during("engine", slot, activity)
        with busy, doing, about:
            resp = self.collector.made(req)
        if slot.made_by(self._calls.finish(slot.number)):
            self._flight.note(slot)
        with self._threads.change():
            self._flight.unscored.append((slot, resp))
        return True

    def _asked(self, slot: Slot[ScoredGroups]) -> RolloutReq:
        own = RequestOf(slot.rollout, slot.number, skips=slot.num_skipped, mixes=self._slots.num_mixed)
        return self.collector.asked(own, self._groups_per_request)

    def _score(self, activity: Activity) -> bool:
        unscored = self._flight.unscored
        item = self._threads.next("reward", lambda: unscored.popleft() if unscored else None)
        if item is None:
            return False
        slot, resp = item
        with self._threads.request("reward", *self._during("reward", slot, activity)):
            groups = None if slot.is_dropped else self.collector.scored(slot.rollout, resp)
        with self._threads.change():
            if self._slots.finish(slot, groups) is None:
                (groups or resp).release()
        return True

    def _during(self, name: str, slot: Slot[ScoredGroups], activity: Activity) -> tuple[Any, ...]:  # Any: contexts
        about = self._clock.about(request=slot.number, rollout=slot.rollout, version=slot.version)
        doing = activity.doing(f"request {slot.number} of rollout {slot.rollout}")
        return self._gauges.busy[name].call(), doing, about

    # The thread that trains ---------------------------------------------------------------------------------------

    def _hold_up(self, *names: str, before: int) -> None:
        """Wait until these are between two requests, or two calls, where they stay until the push of version
        `before`."""
        begun = time.monotonic()
        if self._order is not None and self._slots.version < before:
            self._threads.wait(
                "the requests of this version", lambda: not self._flight.is_next_due() and self._calls.is_settled
            )
        with self._threads.change():
            self._threads.hold_up(names)
            self._calls.close()
        if self._cuts_calls:
            self._cut_short()
        self._threads.wait("the end of a request", lambda: self._threads.are_idle(names) and self._calls.is_quiet)
        self._gauges.push_wait_s += time.monotonic() - begun

    def _cut_short(self) -> None:
        self._threads.repeat_until(
            self.collector.cut_short, lambda: self._threads.are_idle(["engine"]) and self._calls.is_quiet
        )

    def _oldest(self, rollout_id: int) -> list[Slot[ScoredGroups]]:
        """The requests of this rollout, when they are finished; they keep their slots."""
        wanted = None if self._order is None else requests_of(self._order, rollout_id, self._slots.per_rollout)
        slots = self._threads.awaited("the requests of the oldest rollout", lambda: self._slots.oldest(wanted))
        for slot in (slot for slot in slots if slot.rollout != rollout_id):
            self._flight.note(slot, rollout_id)
        return slots
