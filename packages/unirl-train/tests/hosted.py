"""An object that pools host in tests."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor

from unirl.types.errors import ConfigError


class Hosted:
    """Answers with its process id. Fails to be made while the file `broken` is there."""

    def __init__(self, broken=None):
        if broken is not None and os.path.exists(broken):
            raise ConfigError("it is broken")
        self._threads = ThreadPoolExecutor(4)

    def _given(self, value):
        future = Future()
        future.set_result(value)
        return future

    def where(self):
        return self._given(os.getpid())

    def sleep(self, seconds):
        return self._threads.submit(time.sleep, seconds)

    def refuse(self):
        raise ConfigError("no such thing")

    def die(self):
        return self._threads.submit(os.kill, os.getpid(), signal.SIGKILL)

    def stop(self):
        return self._threads.submit(os.kill, os.getpid(), signal.SIGSTOP)

    def gauges(self):
        return self._given({"busy_s": 2.0, "process_restarts": 1.0})

    def close(self):
        return self._given(None)
