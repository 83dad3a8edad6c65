"""An engine's process: start, call, stop. Every wait has a timeout, and no process outlives its owner."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from unirl.rollout.engine.child.messages import Beat, Failed, Message, MessageCodec
from unirl.rollout.engine.process_group import end_group, shared_memory
from unirl.rollout.engine.process_log import end_of_log
from unirl.types import errors
from unirl.types.errors import ConfigError, UniRLError, WorkerError
from unirl.types.heartbeat import BEAT_S, Heartbeat, Report

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 10.0


def interpreter(python: str | None, *, engine: str, environment: str) -> str:
    """Interpreter that has the engine: `python`, or the running one. Raises ConfigError if the file is missing.

    environment: folder of the project that builds such an environment on a host without a GPU.
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
    """A child process that answers messages over a private pipe. Several threads may wait for answers at once.

    codec: encodes its messages; has the engine's name in errors. python: its interpreter. variables: additional
    environment variables. folder: for files that both sides exchange. module: what the interpreter runs. log: file for
    its output. The child ends when the pipe closes, also if this process is killed, and deletes the folder.
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
        """Unanswered calls by number; None once the pipe has closed."""
        self._shared: set[int] | None = None
        """Shared memory of its processes, recorded at the first answer, since some of them may die before the end."""
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
        self._heartbeat = Heartbeat(self.name)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group id."""
        return self._child.pid

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return f"{self._codec.engine} (pid {self.pid})"

    @property
    def log(self) -> Path:
        """File with the child's output."""
        return self._log

    @property
    def is_alive(self) -> bool:
        """True if the child runs."""
        return self._child.poll() is None

    @property
    def death(self) -> str:
        """How the child ended, with the end of its log."""
        code = self._child.poll()
        how = "is gone" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{how}. {self._tail()}"

    def post(self, message: Message) -> None:
        """Send a message that has no answer."""
        self._send(message, 0)

    def ask(self, message: Message) -> Future[Message]:
        """Send a message; pass the future to `answer`. Raises WorkerError if the child is dead."""
        asked: Future[Message] = Future()
        with self._noting:
            number = next(self._calls)
            if self._waiting is not None:
                self._waiting[number] = asked
        self._send(message, number)
        return asked

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return its answer.

        Raises the child's error if it is one of unirl.types, else WorkerError with its traceback, or with the end of
        its log if it died. After `timeout_s` the child is killed and WorkerError says so.
        """
        return self.answer(self.ask(message), type(message).__name__, timeout_s)

    def answer(self, asked: Future[Message], what: str, timeout_s: float) -> Message:
        """Wait for an answer; raises as `call` does. what: name of the message, for errors."""
        deadline = time.monotonic() + timeout_s
        try:
            while not asked.done() and (left := deadline - time.monotonic()) > 0:
                wait([asked], min(left, BEAT_S))
                if not asked.done() and (silence := self._heartbeat.silence()):
                    logger.warning("%s waits: %s", what, silence)
            answer = asked.result(0)
        except TimeoutError as error:
            tail = self._tail()
            self.kill()
            raise WorkerError(
                self.name,
                f"no answer to {what} within {timeout_s:.0f} s, so it was stopped. If the work is that long, raise "
                f"engine.timeout_s (or engine.start_timeout_s). {self._heartbeat.last}\n{tail}",
            ) from error
        except EOFError as error:
            raise self._death(f"died in {what}") from error
        if isinstance(answer, Failed):
            raise self._raised(answer)
        if self._shared is None:
            self._shared = shared_memory(self.pid)
        return answer

    def stop(self) -> None:
        """End the child and all processes that it started. Safe to call twice."""
        self._hang_up()  # the child leaves by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LEAVE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the child and all processes that it started; its folder stays. Safe to call twice."""
        end_group(self._child.pid, self._shared or set())
        self._child.wait()
        self._hang_up()
        self._reader.join()
        with self._sending:
            self._pipe.close()

    def _hang_up(self) -> None:
        """Shut the pipe down for both sides; closing it would not wake the reading thread."""
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
        """Pass answers to the waiting callers until the pipe closes."""
        try:
            while True:
                call, message = self._codec.decode_call(self._pipe.recv_bytes())
                if isinstance(message, Beat):
                    self._heartbeat.beat(Report(message.doing, message.since_s, message.stack))
                    continue
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
        return WorkerError(self.name, f"the process {what} and {self.death}")

    def _tail(self) -> str:
        return end_of_log(self._log) or "It left no log."
