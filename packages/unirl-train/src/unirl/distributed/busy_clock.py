"""How long workers had something to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class BusyClock:
    """Adds up the seconds in which at least one call was under way. Calls may begin and end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._since = 0.0
        self._busy_s = 0.0

    def begin(self) -> None:
        """A call has left."""
        with self._lock:
            if not self._num_calls:
                self._since = time.monotonic()
            self._num_calls += 1

    def end(self) -> None:
        """A call that had left was answered, or failed."""
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                self._busy_s += time.monotonic() - self._since

    @contextmanager
    def call(self) -> Generator[None]:
        """Inside, a call is under way."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def take(self) -> float:
        """Busy seconds since the last `take`, those of calls under way included."""
        with self._lock:
            now = time.monotonic()
            if self._num_calls:
                self._busy_s += now - self._since
                self._since = now
            taken, self._busy_s = self._busy_s, 0.0
            return taken
