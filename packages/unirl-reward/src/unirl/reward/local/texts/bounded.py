"""Calls of a function in its own process, within a budget of CPU seconds and memory.

Texts of a model can hold expressions that take forever, or all memory, and code in C cannot be interrupted from within.
The process is started once and asked over pipes, one JSON line per call; a call over its budget ends the process,
and the next call starts another. Imports no torch, because the process does not either.
"""

from __future__ import annotations

import importlib
import json
import math
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO

START_S = 120.0
"""Wall-clock seconds that starting may take on a busy machine."""
WALL_FACTOR = 60
"""Wall-clock seconds that a call may take for each CPU second of its budget; beyond, the machine is at fault."""


class OverBudgetError(Exception):
    """A call took more CPU or memory than its budget."""


class BoundedFunction:
    """`function`, a dotted path, called with strings in another process.

    cpu_s: CPU seconds of one call, a whole number; the kernel enforces it, so it does not depend on what else runs.
    memory_bytes: address space of the process. Calls of several threads wait for one another.
    """

    def __init__(self, function: str, *, cpu_s: int, memory_bytes: int) -> None:
        self._arguments = [function, str(cpu_s), str(memory_bytes)]
        self._wall_s = float(cpu_s * WALL_FACTOR)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *arguments: str) -> str:
        """The function's answer.

        Raises OverBudgetError if it takes more than its budget, ValueError with the message of a ValueError of the
        function, RuntimeError if the process cannot be started, dies or hangs for another reason.
        """
        with self._lock:
            process = self._started()
            try:
                reply = _exchange(process, json.dumps(arguments), self._wall_s)
            except (OSError, EOFError, TimeoutError) as error:
                _end(process)
                self._process = None
                if process.returncode == -signal.SIGXCPU:
                    raise OverBudgetError(f"it took more than {self._arguments[1]} CPU seconds") from error
                raise RuntimeError(
                    f"the process that computes {self._arguments[0]} ended with status {process.returncode}: {error}"
                ) from error
        kind, _, content = reply.partition(" ")
        if kind == "over":
            self.close()
            raise OverBudgetError(content)
        if kind == "wrong":
            raise ValueError(content)
        return content

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-P", "-m", "unirl.reward.local.texts.bounded", *self._arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            weakref.finalize(self, _end, self._process)
            try:
                _exchange(self._process, "[]", START_S, is_greeting=True)
            except (OSError, EOFError, TimeoutError) as error:
                _end(self._process)
                self._process = None
                raise RuntimeError(f"the process that computes {self._arguments[0]} did not start: {error}") from error
        return self._process


def _exchange(process: subprocess.Popen[str], question: str, wall_s: float, is_greeting: bool = False) -> str:
    if process.stdin is None or process.stdout is None:
        raise OSError("it was started without pipes")
    if not is_greeting:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    if not select.select([process.stdout], [], [], wall_s)[0]:
        raise TimeoutError(f"no answer within {wall_s:g} s")
    reply = process.stdout.readline()
    if not reply:
        process.wait(timeout=START_S)
        raise EOFError("it closed its output")
    return json.loads(reply)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            _close(pipe)


def _close(pipe: IO[str]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        pass  # the last question was not read


# In the other process -----------------------------------------------------------------------------------------------


def serve(function: Callable[..., str], cpu_s: int, memory_bytes: int, source: IO[str], sink: IO[str]) -> None:
    """Answer questions until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, memory_bytes)
    sink.write('"ready"\n')
    sink.flush()
    for line in source:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s))
        sink.write(json.dumps(_answer(function, json.loads(line))) + "\n")
        sink.flush()


def _limit(kind: int, value: int) -> None:
    """Set the soft limit; the hard one stays, because only the superuser could raise it again."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(function: Callable[..., str], arguments: Sequence[str]) -> str:
    try:
        return f"is {function(*arguments)}"
    except MemoryError:
        return "over it took more memory than it may"
    except RecursionError:
        return "over it is nested too deeply"
    except ValueError as error:
        return f"wrong {error}"


def main() -> None:
    """Entry point of the other process: dotted path of the function, CPU seconds, bytes."""
    path, cpu_s, memory_bytes = sys.argv[1:]
    module, _, name = path.rpartition(".")
    # Libraries print; the pipe is for answers alone.
    sink, sys.stdout = sys.stdout, sys.stderr
    serve(vars(importlib.import_module(module))[name], int(cpu_s), int(memory_bytes), sys.stdin, sink)


if __name__ == "__main__":
    main()
