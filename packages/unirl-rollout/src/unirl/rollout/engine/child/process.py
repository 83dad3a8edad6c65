"""The process that an engine lives in: start, call, stop. Every wait has a limit, and no process outlives its owner."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from unirl.rollout.engine.child.messages import Failed, Message, MessageCodec
from unirl.types import errors
from unirl.types.errors import ConfigError, UniRLError, WorkerError

_LOG_TAIL_BYTES = 4000
_LEAVE_TIMEOUT_S = 10.0


def interpreter(python: str | None, *, engine: str, environment: str) -> str:
    """The Python that has an engine: `python`, or the running one. Raises ConfigError where the file is missing.

    environment: folder of the project that makes one for a host without a GPU.
    """
    if python is None:
        return sys.executable
    path = Path(python)
    if not path.is_file():
        raise ConfigError(
            f"engine.python = {python!r} is no file (looked in {path.absolute().parent}). Make {engine}'s environment "
            f"with `uv sync --project {environment}`, or name the interpreter of the one you have."
        )
    return str(path.absolute())  # not resolved: a link inside an environment is what makes it that environment


class EngineProcess:
    """A child that answers one message at a time, over a pipe that only the two of them know.

    codec: its messages, and the engine's name in errors. python: its interpreter. variables: environment variables of
    its own. folder: of the files that the two exchange. module: what it runs. log: file of what it writes. The child
    ends when the pipe does, so also when this process is killed, and takes the folder along.
    """

    def __init__(
        self, codec: MessageCodec, python: str, variables: Mapping[str, str], folder: Path, *, module: str, log: Path
    ) -> None:
        self._codec = codec
        self._log = log
        self._calling = threading.Lock()
        self._sending = threading.Lock()
        self._pipe, theirs = multiprocessing.Pipe()
        settings = [f"{name}={value}" for name, value in variables.items()]
        with self._log.open("wb") as output:
            self._child = subprocess.Popen(
                ["env", *settings, python, "-m", module, str(theirs.fileno()), str(folder)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the child in order
            )
        theirs.close()

    @property
    def pid(self) -> int:
        """The child's process id, also the id of the group of all that it starts."""
        return self._child.pid

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return f"{self._codec.engine} (pid {self.pid})"

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    def post(self, message: Message) -> None:
        """Send without waiting for an answer. Safe while another thread waits for one."""
        try:
            with self._sending:
                self._pipe.send_bytes(self._codec.encode(message))
        except OSError as error:
            raise self._death(f"could not be sent {type(message).__name__}") from error

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return its answer; one call at a time.

        Raises what the child raised where it is an error of unirl.types, else WorkerError: with its traceback, or with
        the end of its log where it died. After `timeout_s` it is killed and WorkerError says so.
        """
        with self._calling:
            self.post(message)
            return self.receive(type(message).__name__, timeout_s)

    def receive(self, what: str, timeout_s: float) -> Message:
        """Wait for the answer to `what`. As `call`."""
        try:
            if not self._pipe.poll(timeout_s):
                tail = self._tail()
                self.kill()
                raise WorkerError(
                    self.name,
                    f"no answer to {what} within {timeout_s:.0f} s, so it was stopped. If the work is that long, raise "
                    f"engine.timeout_s (or engine.start_timeout_s). {tail}",
                )
            answer = self._codec.decode(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise self._death(f"died in {what}") from error
        if isinstance(answer, Failed):
            raise self._raised(answer)
        return answer

    def stop(self) -> None:
        """End the child and all that it started. Safe to call twice."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # the child leaves by itself; closing would not wake a thread that reads
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LEAVE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the child and all that it started at once; its folder stays. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._pipe.close()

    def _raised(self, failed: Failed) -> UniRLError:
        kind = vars(errors).get(failed.kind)
        if isinstance(kind, type) and issubclass(kind, UniRLError) and kind is not WorkerError:
            return kind(failed.text)
        return WorkerError(self.name, f"{failed.traceback_text or failed.text}\n{self._tail()}")

    def _death(self, what: str) -> WorkerError:
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(deadline - time.monotonic())
        code = self._child.poll()
        how = "is gone" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return WorkerError(self.name, f"the process {what} and {how}. {self._tail()}")

    def _tail(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return f"The end of its log:\n{log.read().decode(errors='replace')}"
        return "It left no log."
