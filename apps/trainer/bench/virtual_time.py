"""Runs the threads of a program on virtual time: they take turns, and when all wait, the clock is put forward.

Inside `VirtualThreads.running`, one thread works at a time, until it waits; then the next one in line does. When all
wait, time jumps to the end of the shortest sleep. A run of hours takes as long as its threads compute, and any two runs
are the same.
Python's locks, conditions, events, queues, thread pools and `time.monotonic` take part; what waits in C (sockets, child
processes) must not be used.
"""

# ruff: noqa: INP001, SLF001, T201 - a script, no package; it replaces what the standard library builds its waits of
from __future__ import annotations

import _thread
import concurrent.futures.thread
import contextlib
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Any
from unittest import mock


class Turn:
    """A thread, which works when its gate opens."""

    def __init__(self) -> None:
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.is_waiting = False
        self.is_late = False
        """True if it waited as long as it would."""
        self.num_waits = 0
        self.is_over = False
        self.joining: list[Turn] = []


class VirtualThreads:
    """Who works, who waits, and what time it is. Begins with the thread that makes it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[Turn] = deque()
        self._alarms: list[tuple[float, int, Turn, int]] = []
        """When, in which order, who, and which wait of it."""
        self._numbers = itertools.count()
        self._current = Turn()
        self._turns: dict[threading.Thread, Turn] = {}

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self._wait(seconds)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Inside, threads and locks that are made are these. Threads must have ended before."""
        join = threading.Thread.join

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            turn = self._turns.get(thread)
            if turn is not None and not turn.is_over:
                turn.joining.append(self._current)
                self._wait()
            join(thread)

        with contextlib.ExitStack() as patches:
            for owner, name, value in (
                (threading, "_allocate_lock", self._lock),
                (threading, "Lock", self._lock),
                (threading, "_CRLock", None),
                (threading, "_start_new_thread", self._start),
                (threading, "_time", lambda: self.now_s),
                (threading.Thread, "join", joined),
                (time, "monotonic", lambda: self.now_s),
                (queue, "SimpleQueue", vars(queue)["_PySimpleQueue"]),
                (concurrent.futures.thread, "_global_shutdown_lock", self._lock()),
            ):
                patches.enter_context(mock.patch.object(owner, name, value))
            yield

    def _lock(self) -> TurnLock:
        return TurnLock(self)

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Let others work until this thread is woken; False if `timeout_s` was over before."""
        own = self._current
        own.is_waiting, own.is_late = True, False
        own.num_waits += 1
        if timeout_s is not None:
            heapq.heappush(self._alarms, (self.now_s + timeout_s, next(self._numbers), own, own.num_waits))
        following = self._following()
        if following is not own:
            self._current = following
            following.gate.release()
            own.gate.acquire()
        return not own.is_late

    def _wake(self, turn: Turn) -> None:
        if turn.is_waiting:
            turn.is_waiting = False
            self._ready.append(turn)

    def _following(self) -> Turn:
        while not self._ready:
            if not self._alarms:
                raise RuntimeError("every thread waits for another one")
            at_s, _, turn, num_waits = heapq.heappop(self._alarms)
            if turn.is_waiting and turn.num_waits == num_waits:
                self.now_s, turn.is_late = at_s, True
                self._wake(turn)
        return self._ready.popleft()

    def _start(self, function: Any, args: tuple[Any, ...]) -> int:  # Any: a method of a thread
        turn = Turn()
        self._turns[function.__self__] = turn
        self._ready.append(turn)

        def work() -> None:
            turn.gate.acquire()
            try:
                function(*args)
            finally:
                turn.is_over = True
                for other in turn.joining:
                    self._wake(other)
                self._current = self._following()
                self._current.gate.release()

        return _thread.start_new_thread(work, ())


class TurnLock:
    """A lock, which goes to those that wait for it in their order."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._is_taken = False
        self._waiting: deque[Turn] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.Lock."""
        if not self._is_taken:
            self._is_taken = True
            return True
        if not blocking or timeout == 0:
            return False
        own = self._threads._current
        self._waiting.append(own)
        if self._threads._wait(None if timeout < 0 else timeout):
            return True  # whoever had it has handed it over
        self._waiting.remove(own)
        return False

    def release(self) -> None:
        """As threading.Lock."""
        if not self._is_taken:
            raise RuntimeError("release unlocked lock")
        if self._waiting:
            self._threads._wake(self._waiting.popleft())
        else:
            self._is_taken = False

    def locked(self) -> bool:
        """As threading.Lock."""
        return self._is_taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()
