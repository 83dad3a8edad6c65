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

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from unirl.distributed.busy_clock import BusyClock
from unirl.distributed.held import Held
from unirl.trainer.base import Trainer
from unirl.trainer.collector import RequestOf, ScoredGroups
from unirl.trainer.guardrails import PARTS, WALL_S
from unirl.trainer.loops.calls import CallOrder, CallsEndedError
from unirl.trainer.loops.order import Begun, OrderLog
from unirl.trainer.loops.slots import Slot, Slots
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import CheckpointError
from unirl.types.heartbeat import Activity
from unirl.types.rollout import RolloutReq, RolloutResp

logger = logging.getLogger(__name__)

STUCK_S = 600.0
"""After so many seconds of waiting for one thing a warning says what the others do; again after each doubling."""


CUT_AGAIN_S = 0.5
"""Seconds after which calls that still run are told again to end early."""


@dataclass(frozen=True)
class _Cut:
    """A request that a push has cut short."""

    slot: Slot[ScoredGroups]
    req: RolloutReq
    begun: Held


class AsyncTrainer(Trainer):
    """Trains on rollouts that are collected ahead, at most `max_staleness` versions old.

    groups_per_request: prompts of one request; None: all of a rollout. Smaller ones are fresher and let engine and
    reward overlap more, larger ones fill the engine better.
    window: see `unirl.trainer.loops.slots.Slots`.
    requests_at_once: requests that engines of served pools have at most; None: all that have a slot. Other engines
        take one, and a repeated order as many as it needs.
    cuts_calls: a push does not wait for the calls that run: they end early, and go on after it.
    log, order: write down, and repeat, with which version of the weights each request and its calls begin; see
        `unirl.trainer.loops.order`.
    Other arguments: see `Trainer`. What a thread raises, the run raises.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        max_staleness: int,
        groups_per_request: int | None = None,
        window: int = 1,
        requests_at_once: int | None = None,
        cuts_calls: bool = False,
        log: OrderLog | None = None,
        order: Mapping[int, Begun] | None = None,
        **parts: Any,  # Any: as Trainer
    ) -> None:
        super().__init__(settings, **parts)
        self._groups_per_request = groups_per_request or settings.batch_size
        self._cuts_calls = cuts_calls
        self._log = log
        self._order = order
        self._busy = {name: BusyClock() for name in PARTS}
        self._measured_at = time.monotonic()
        self._changed = threading.Condition()
        """Guards what follows; notified when any of it changes."""
        per_rollout = settings.batch_size // self._groups_per_request
        self._slots: Slots[ScoredGroups] = Slots(per_rollout, max_staleness, window)
        most = self._slots.capacity
        self._requests_at_once = most if order is not None else min(requests_at_once or most, most)
        self._calls = CallOrder(self._changed, order)
        self._is_shared = False
        """True if the engine takes several requests at once, whose calls begin as `_calls` says."""
        self._admitting = threading.Lock()
        """Held by the thread that asks for the next prompts."""
        self._cut: deque[_Cut] = deque()
        """Requests that were cut short, where the engine takes one at a time."""
        self._unscored: deque[tuple[Slot[ScoredGroups], Held]] = deque()
        self._working: set[str] = set()
        """What is in a request: "engine", "reward". An engine with several requests: while it is asked for one."""
        self._activity: list[tuple[str, Activity]] = []
        """What each thread does, with the name of its part."""
        self._push_wait_s = 0.0
        self._held_up = {"engine"}
        """What begins no request: the engine until the first push, and both from an evaluation to the next push."""
        self._ends = False
        self._failure: BaseException | None = None

    def step(self, rollout_id: int) -> dict[str, float]:
        """Push, and train on the oldest rollout; returns its metrics."""
        record = self._record
        self._hold_up("engine", before=rollout_id)
        with self._busy["learner"].call(), self.collector.engine_in_use:
            record.scale_pools()
            pushed = self._learner.push(rollout_id, self.collector.rollout_policy)
        with self._change():
            if rollout_id > self._slots.version:
                self._slots.free()
            self._held_up.clear()
        self._calls.open(self._slots.version)
        slots = self._oldest(rollout_id)
        with self._busy["learner"].call(), self._clock.about(rollout=rollout_id):
            groups = [slot.item for slot in slots if slot.item is not None]
            rollout = self.collector.ready(rollout_id, groups, show=self._shows(rollout_id))
            spans = _span_metrics(rollout.resp.meta) if self._cuts_calls else {}
            trained = self._learned(rollout, [slot.number for slot in slots])
        own = self._metrics(slots, rollout.num_samples)
        return {
            **rollout.metrics,
            **pushed,
            **trained,
            **self._clock.step_metrics(),
            **record.pool_metrics(),
            **own,
            **spans,
        }

    def _loop(self) -> None:
        left = self.collector.left_over
        if left is not None and left.prompts_per_request != self._groups_per_request:
            raise CheckpointError(
                f"the checkpoint has trained on requests of {left.prompts_per_request} prompts ahead of older ones, "
                f"and this run has {self._groups_per_request}. Resume with schedule.groups_per_request: "
                f"{left.prompts_per_request}."
            )
        if left is None:
            self._slots.start(self._done)
        else:
            self._slots.start(self._done, first=left.oldest, ahead=left.ahead)
        self._measured_at = time.monotonic()
        self._is_shared = self.collector.deal_by(self._calls)
        generate = [self._generate_among_others] * self._requests_at_once if self._is_shared else [self._generate]
        threads = [threading.Thread(target=self._repeat, args=(work,)) for work in (*generate, self._score)]
        for thread in threads:
            thread.start()
        try:
            super()._loop()
        finally:
            with self._change():
                self._ends = True
            self._calls.end()
            if self._cuts_calls and self._failure is None:
                self._cut_short()
            for thread in threads:
                thread.join()
            cut = [each.begun for each in self._cut]
            for left in (*self._slots.clear(), *(resp for _, resp in self._unscored), *cut):
                left.release()

    def _takes_left_over(self) -> bool:
        return True

    def _evaluate(self, done: int) -> dict[str, float]:
        self._hold_up("engine", "reward", before=done)
        return super()._evaluate(done)

    # Threads of engine and reward ---------------------------------------------------------------------------------

    def _repeat(self, work: Callable[[Activity], bool]) -> None:
        """Work until the end; what it raises ends the run."""
        activity = Activity()
        self._activity.append(("reward" if work == self._score else "engine", activity))
        try:
            while work(activity):
                pass
        except CallsEndedError:
            return
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._change():
                self._failure = error

    def _generate(self, activity: Activity) -> bool:
        found = self._next("engine", self._begun_or_admitted)
        if found is None:
            return False
        slot, cut = found
        if cut is not None:
            slot.resumed = (*slot.resumed, self._slots.version)
        self._note(slot)
        with self._request("engine", slot, activity):
            req = self._asked(slot) if cut is None else cut.req
            resp = self.collector.made(req, None if cut is None else cut.begun)
        with self._change():
            if resp.meta.num_unfinished:
                self._cut.append(_Cut(slot, req, resp))
            else:
                self._unscored.append((slot, resp))
        return True

    def _begun_or_admitted(self) -> tuple[Slot[ScoredGroups], _Cut | None] | None:
        if self._cut:
            cut = self._cut.popleft()
            return cut.slot, cut
        slot = self._admitted()
        return None if slot is None else (slot, None)

    def _generate_among_others(self, activity: Activity) -> bool:
        """As `_generate`, where other threads do the same: prompts are asked for in the order of the requests."""
        with self._admitting:
            slot = self._next("engine", self._admitted)
            if slot is None:
                return False
            self._note(slot)
            with self._request("engine", slot, activity):
                req = self._asked(slot).replace(number=slot.number)
        with self._busy["engine"].call(), activity.doing(_shown(slot)), self._about(slot):
            resp = self.collector.made(req)
        calls = self._calls.finish(slot.number)
        slot.calls = {pool: tuple(call[0] for call in own) for pool, own in calls.items()}
        slot.resumed = sorted({version for own in calls.values() for call in own for version in call[1:]})
        if slot.versions == {slot.version}:
            slot.calls = {}
        else:
            self._note(slot)
        with self._change():
            self._unscored.append((slot, resp))
        return True

    def _asked(self, slot: Slot[ScoredGroups]) -> RolloutReq:
        mixes = self._slots.max_staleness if self._slots.window > 1 else 0
        own = RequestOf(slot.rollout, slot.number, skips=slot.num_skipped, mixes=mixes)
        return self.collector.asked(own, self._groups_per_request)

    def _note(self, slot: Slot[ScoredGroups], trained: int | None = None) -> None:
        if self._log is not None:
            self._log.begun(slot.number, slot.rollout, slot.version, slot.calls, trained, slot.resumed)

    def _admitted(self) -> Slot[ScoredGroups] | None:
        is_due = self._order is None or self._is_next_due(self._order)
        slot = self._slots.admit(until=self._settings.num_rollouts) if is_due else None
        if slot is not None and self._is_shared:
            self._calls.admit(slot.number)
        return slot

    def _is_next_due(self, order: Mapping[int, Begun]) -> bool:
        """True if the next request begins with the present version, or with one from before a resume."""
        begun = order.get(self._slots.next_request)
        return begun is not None and begun.version <= self._slots.version

    def _score(self, activity: Activity) -> bool:
        item = self._next("reward", lambda: self._unscored.popleft() if self._unscored else None)
        if item is None:
            return False
        slot, resp = item
        with self._request("reward", slot, activity):
            groups = self.collector.scored(slot.rollout, resp)
        with self._change():
            slot.item = groups
        return True

    def _next(self, name: str, take: Callable[[], Any]) -> Any:  # Any: what `take` gives
        """What `take` gives when it gives something and `name` is not held up; None at the end of the run."""
        found = None

        def is_found() -> bool:
            nonlocal found
            if not self._ends and name not in self._held_up:
                found = take()
            return found is not None or self._ends or self._failure is not None

        with self._changed:
            self._changed.wait_for(is_found)
            if found is not None:
                self._working.add(name)
        return found

    @contextlib.contextmanager
    def _request(self, name: str, slot: Slot[ScoredGroups], activity: Activity) -> Generator[None]:
        try:
            with self._busy[name].call(), activity.doing(_shown(slot)), self._about(slot):
                yield
        finally:
            with self._change():
                self._working.discard(name)

    def _about(self, slot: Slot[ScoredGroups]) -> AbstractContextManager[None]:
        return self._clock.about(request=slot.number, rollout=slot.rollout, version=slot.version)

    # The thread that trains ---------------------------------------------------------------------------------------

    def _hold_up(self, *names: str, before: int) -> None:
        """Wait until these are between two requests, or two calls, where they stay until the push of version
        `before`."""
        order, begun = self._order, time.monotonic()
        if order is not None and self._slots.version < before:
            self._wait("the requests of this version", lambda: not self._is_next_due(order) and self._calls.is_settled)
        with self._change():
            self._held_up.update(names)
            self._calls.close()
        if self._cuts_calls:
            self._cut_short()
        self._wait("the end of a request", lambda: self._working.isdisjoint(names) and self._calls.is_quiet)
        self._push_wait_s += time.monotonic() - begun

    def _cut_short(self) -> None:
        """End early what the engine generates; again after a while, since a call may just have begun."""

        def is_quiet() -> bool:
            return self._failure is not None or ("engine" not in self._working and self._calls.is_quiet)

        while True:
            with self._changed:
                if is_quiet():
                    return
            self.collector.cut_short()
            with self._changed:
                self._changed.wait_for(is_quiet, CUT_AGAIN_S)

    def _oldest(self, rollout_id: int) -> list[Slot[ScoredGroups]]:
        """The requests of this rollout, when they are finished; they keep their slots."""
        wanted, per_rollout = None, self._slots.per_rollout
        if self._order is not None:
            wanted = {n for n, begun in self._order.items() if begun.rollout(n, per_rollout) == rollout_id}
        self._wait("the requests of the oldest rollout", lambda: self._slots.oldest(wanted) is not None)
        with self._changed:
            slots = self._slots.oldest(wanted) or []
        for slot in slots:
            if slot.rollout != rollout_id:
                self._note(slot, rollout_id)
        return slots

    def _wait(self, what: str, is_settled: Callable[[], bool]) -> None:
        """Wait for the other threads. Raises what ended one."""
        begun, patience_s = time.monotonic(), STUCK_S
        with self._changed:
            while not self._changed.wait_for(lambda: self._failure is not None or is_settled(), patience_s):
                doing = "; ".join(f"{name}: {activity.report()}" for name, activity in self._activity)
                waited_s = time.monotonic() - begun
                logger.warning("training has waited for %s for %.0f s. %s", what, waited_s, doing)
                patience_s = waited_s
            if self._failure is not None:
                raise self._failure

    @contextlib.contextmanager
    def _change(self) -> Generator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def _metrics(self, slots: list[Slot[ScoredGroups]], num_samples: int) -> dict[str, float]:
        """How old the samples are, what waits, and who waited since the last rollout."""
        lags = [self._slots.version - version for slot in slots for version in slot.versions]
        begun, self._measured_at = self._measured_at, time.monotonic()
        wall_s = self._measured_at - begun
        busy_s = {name: clock.take() for name, clock in self._busy.items()}
        held_s, self._push_wait_s = self._push_wait_s, 0.0
        with self._changed:
            waiting = self._slots.num_waiting - len(slots)
        return {
            "schedule/lag/newest": float(min(lags)),
            "schedule/lag/oldest": float(max(lags)),
            "schedule/requests_waiting": float(waiting),
            "schedule/requests_overtaken": float(self._slots.num_overtaken),
            "schedule/push_wait_s": held_s,
            **{f"schedule/{name}_idle_s": max(0.0, wall_s - seconds) for name, seconds in busy_s.items()},
            WALL_S: wall_s,
            "schedule/concurrency": sum(busy_s.values()) / wall_s,
            "perf/samples_per_s": num_samples / wall_s,
        }


def _shown(slot: Slot[ScoredGroups]) -> str:
    return f"request {slot.number} of rollout {slot.rollout}"


def _span_metrics(resp: RolloutResp) -> dict[str, float]:
    """How many samples several versions made, and over how many optimizer steps. resp: metadata."""
    spans = [
        track.last_versions - track.policy_versions
        for track in resp.tracks.values()
        if track.last_versions is not None and track.policy_versions is not None
    ]
    steps = torch.cat([torch.zeros(1, dtype=torch.long), *spans])
    return {"schedule/samples_resumed": float((steps > 0).sum()), "schedule/version_span/max": float(steps.max())}
