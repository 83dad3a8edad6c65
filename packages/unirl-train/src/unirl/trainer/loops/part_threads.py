"""The threads of the driver in which engine and reward work while the main thread trains."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from unirl.trainer.loops.calls import CallsEndedError
from unirl.types.heartbeat import Activity

logger = logging.getLogger(__name__)

STUCK_S = 600.0
"""After so many seconds of waiting for one thing a warning says what the others do; again after each doubling."""
AGAIN_S = 0.5
"""Seconds after which what still works is told again to end early."""

ItemT = TypeVar("ItemT")
Work = Callable[[Activity], bool]
"""One request of a part, from beginning to end; False at the end of the run."""


class PartThreads:
    """What the parts work at, who is held up, and what ended one. What a thread raises, the main thread raises.

    Parts are "engine" and "reward". The engine is held up until `let_go`.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards what the threads share, here and of the loop; notified when any of it changes."""
        self.failure: BaseException | None = None
        self._working: set[str] = set()
        """What is in a request. An engine with several requests: while it is asked for one."""
        self._activity: list[tuple[str, Activity]] = []
        """What each thread does, with the name of its part."""
        self._held_up = {"engine"}
        self._is_over = False
        self._threads: list[threading.Thread] = []

    # The main thread ----------------------------------------------------------------------------------------------

    def start(self, works: Sequence[tuple[str, Work]]) -> None:
        """Begin a thread for each, which does the work again and again. works: with the name of the part."""
        self._threads = [threading.Thread(target=self._repeat, args=own) for own in works]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let no part begin anything any more."""
        with self.change():
            self._is_over = True

    def join(self) -> None:
        """Wait for the end of what they have begun."""
        for thread in self._threads:
            thread.join()

    def hold_up(self, names: Sequence[str]) -> None:
        """Let these parts begin nothing until `let_go`. Call it while `changed` is held."""
        self._held_up.update(names)

    def let_go(self) -> None:
        """Let all parts begin again. Call it while `changed` is held."""
        self._held_up.clear()

    @property
    def is_over(self) -> bool:
        """True after `end`."""
        return self._is_over

    def are_idle(self, names: Sequence[str]) -> bool:
        """True if none of these parts is in a request."""
        return self._working.isdisjoint(names)

    def wait(self, what: str, is_settled: Callable[[], bool]) -> None:
        """Wait for the other threads. Raises what ended one. what: for the warning that it takes long."""
        self.awaited(what, lambda: True if is_settled() else None)

    def awaited(self, what: str, find: Callable[[], ItemT | None]) -> ItemT:
        """Wait until the other threads have made what `find` finds; otherwise as `wait`."""
        begun, patience_s = time.monotonic(), STUCK_S
        found: list[ItemT] = []

        def is_there() -> bool:
            item = find()
            if item is not None:
                found.append(item)
            return self.failure is not None or bool(found)

        with self.changed:
            while not self.changed.wait_for(is_there, patience_s):
                doing = "; ".join(f"{name}: {activity.report()}" for name, activity in self._activity)
                waited_s = time.monotonic() - begun
                logger.warning("training has waited for %s for %.0f s. %s", what, waited_s, doing)
                patience_s = waited_s
            if self.failure is not None:
                raise self.failure
            return found[0]

    def repeat_until(self, tell: Callable[[], None], is_quiet: Callable[[], bool]) -> None:
        """Tell the others something until they are quiet, again after a while, since one may just have begun; or until
        one has failed."""

        def is_over() -> bool:
            return self.failure is not None or is_quiet()

        while True:
            with self.changed:
                if is_over():
                    return
            tell()
            with self.changed:
                self.changed.wait_for(is_over, AGAIN_S)

    # The threads --------------------------------------------------------------------------------------------------

    def next(self, name: str, take: Callable[[], Any]) -> Any:  # Any: what `take` gives
        """What `take` gives when it gives something and `name` is not held up; None at the end of the run. Whoever gets
        something enters `request` with it."""
        found = None

        def is_found() -> bool:
            nonlocal found
            if not self._is_over and name not in self._held_up:
                found = take()
            return found is not None or self._is_over or self.failure is not None

        with self.changed:
            self.changed.wait_for(is_found)
            if found is not None:
                self._working.add(name)
        return found

    @contextlib.contextmanager
    def request(self, name: str, *during: AbstractContextManager[Any]) -> Generator[None]:
        """Around what a part does with what `next` gave. during: entered meanwhile."""
        try:
            with contextlib.ExitStack() as stack:
                for each in during:
                    stack.enter_context(each)
                yield
        finally:
            with self.change():
                self._working.discard(name)

    @contextlib.contextmanager
    def change(self) -> Generator[None]:
        """Around a change of what the threads share."""
        with self.changed:
            yield
            self.changed.notify_all()

    def _repeat(self, name: str, work: Work) -> None:
        activity = Activity()
        self._activity.append((name, activity))
        try:
            while work(activity):
                pass
        except CallsEndedError:
            return
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self.change():
                self.failure = error
