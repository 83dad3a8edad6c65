"""The process that an engine lives in: start, call, stop. Every wait has a limit, and no process outlives its owner."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from unirl.rollout.engine.child.messages import Failed, Message, MessageCodec
from unirl.rollout.engine.process_group import end_group, shared_memory
from unirl.rollout.engine.process_log import end_of_log
from unirl.types import errors
from unirl.types.errors import ConfigError, UniRLError, WorkerError

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
    """A child that answers messages, over a pipe that only the two of them know. Several may wait for answers at once.

    codec: its messages, and the engine's name in errors. python: its interpreter. variables: environment variables of
    its own. folder: of the files that the two exchange. module: what it runs. log: file of what it writes. The child
    ends when the pipe does, so also when this process is killed, and takes the folder along.
    """

    def __init__(
        self, codec: MessageCodec, python: str, variables: Mapping[str, str], folder: Path, *, module: str, log: Path
    ) -> None:
        self._codec = codec
        self._log = log
        self._sending = threading.Lock()
        self._noting = threading.Lock()
        self._calls = itertools.count()
        self._waiting: dict[int, Future[Message]] | None = {}
        """What was asked and not yet answered, by its number; None where the pipe has ended."""
        self._shared: set[int] | None = None
        """What its processes share, noted when it has answered once: not all of them may live to the end."""
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The child's process id, also the id of the group of all that it starts."""
        return self._child.pid

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return f"{self._codec.engine} (pid {self.pid})"

    @property
    def log(self) -> Path:
        """File of what it writes."""
        return self._log

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    def post(self, message: Message) -> None:
        """Send what has no answer."""
        self._send(message, 0)

    def ask(self, message: Message) -> Future[Message]:
        """Send a message; its answer is for `answer`. Raises WorkerError where the child is dead."""
        asked: Future[Message] = Future()
        with self._noting:
            number = next(self._calls)
            if self._waiting is not None:
                self._waiting[number] = asked
        self._send(message, number)
        return asked

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return its answer.

        Raises what the child raised where it is an error of unirl.types, else WorkerError: with its traceback, or with
        the end of its log where it died. After `timeout_s` it is killed and WorkerError says so.
        """
        return self.answer(self.ask(message), type(message).__name__, timeout_s)

    def answer(self, asked: Future[Message], what: str, timeout_s: float) -> Message:
        """Wait for the answer to `what`. As `call`."""
        try:
            answer = asked.result(timeout_s)
        except TimeoutError as error:
            tail = self._tail()
            self.kill()
            raise WorkerError(
                self.name,
                f"no answer to {what} within {timeout_s:.0f} s, so it was stopped. If the work is that long, raise "
                f"engine.timeout_s (or engine.start_timeout_s). {tail}",
            ) from error
        except EOFError as error:
            raise self._death(f"died in {what}") from error
        if isinstance(answer, Failed):
            raise self._raised(answer)
        if self._shared is None:
            self._shared = shared_memory(self.pid)
        return answer

    def stop(self) -> None:
        """End the child and all that it started. Safe to call twice."""
        self._hang_up()  # the child leaves by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LEAVE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the child and all that it started at once; its folder stays. Safe to call twice."""
        end_group(self._child.pid, self._shared or set())
        self._child.wait()
        self._hang_up()
        self._reader.join()
        with self._sending:
            self._pipe.close()

    def _hang_up(self) -> None:
        """End the pipe, for both sides; closing it would not wake the thread that reads."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def _send(self, message: Message, call: int) -> None:
        try:
            with self._sending:
                if self._waiting is None:
                    raise BrokenPipeError
                self._pipe.send_bytes(self._codec.encode(message, call))
        except OSError as error:
            raise self._death(f"could not be sent {type(message).__name__}") from error

    def _read(self) -> None:
        """Hand answers to those who wait for them, until the pipe ends."""
        try:
            while True:
                call, message = self._codec.decode_call(self._pipe.recv_bytes())
                with self._noting:
                    asked = self._waiting.pop(call) if self._waiting is not None else None
                if asked is not None:
                    asked.set_result(message)
        except (EOFError, OSError):
            end: Exception = EOFError()
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            end = error
        with self._noting:
            left, self._waiting = self._waiting or {}, None
        for asked in left.values():
            asked.set_exception(end)

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
        return end_of_log(self._log) or "It left no log."
