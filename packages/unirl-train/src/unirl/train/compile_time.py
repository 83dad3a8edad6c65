"""What torch.compile takes of a run's time."""

from __future__ import annotations

import threading
import time

from torch._dynamo.callback import CallbackArgs, callback_handler


class CompileClock:
    """Seconds in which this process compiles, whichever model; of compilations at the same time once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds, self._running, self._since = 0.0, 0, 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def lap(self) -> float:
        """Seconds since the last lap, or since the clock was made."""
        with self._lock:
            found, self._seconds = self._seconds, 0.0
            return found

    def _start(self, _: CallbackArgs) -> None:
        with self._lock:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1

    def _end(self, _: CallbackArgs) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._seconds += time.perf_counter() - self._since
