"""A scorer in a child process, whose environment may have other libraries than the trainer's."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from unirl.reward.child.messages import COMPARES_GROUPS, FAILED, Failure, Start
from unirl.reward.wire import UNLIMITED, decode_answer, encode_binary, samples_of
from unirl.types import errors
from unirl.types.bounds import Positive, bounded
from unirl.types.errors import ConfigError, RewardError, UniRLError, WorkerError
from unirl.types.reward import RewardRequest, RewardResponse

logger = logging.getLogger(__name__)

_MAX_DEATHS = 2
"""Processes that one request may end before it is taken for the cause."""
_TAIL_CHARS = 2000
_LEAVE_TIMEOUT_S = 5.0


@bounded("scorer")
class ChildScorer:
    """Runs a scorer class in a process with another interpreter. Implements Scorer.

    scorer: the class, as a dotted path; it is imported there alone. Any scorer does, `FunctionRewardScorer` too.
    python: the interpreter, whose environment has unirl-reward and what the scorer needs; None is the running one.
    arguments: keywords of the class, without `name` and `device`. device: passed on, where the class takes one.
    groupwise: the scorer compares the samples of a prompt, so that it gets whole groups.
    start_timeout_s: most seconds until the scorer is made. timeout_s: most seconds of one request.
    variables: environment variables of the process besides this one's.

    The process starts with the object and makes the scorer meanwhile. One that dies is replaced, and its request asked
    again; one that is late is ended. The numbers are those of the scorer in this process: pixels travel exactly.
    Raises ConfigError when it is first asked, if the environment or the scorer is wrong.
    """

    recipe_rules: ClassVar[str] = "unirl.reward.child.rules"

    def __init__(
        self,
        scorer: str,
        python: str | None = None,
        arguments: Mapping[str, Any] | None = None,  # Any: keywords of the class, as JSON
        *,
        name: str | None = None,
        device: str = "cpu",
        start_timeout_s: Positive = 600.0,
        timeout_s: Positive = 600.0,
        variables: Mapping[str, str] | None = None,
        groupwise: bool = False,
    ) -> None:
        self.name = name or scorer.rpartition(".")[2]
        self.is_groupwise = groupwise
        self._start = Start(scorer, self.name, device, dict(arguments or {}))
        self._python = sys.executable if python is None else str(Path(python).expanduser().absolute())
        if not Path(self._python).is_file():
            raise ConfigError(
                f"scorer {self.name}: python = {python} is no file. Name the interpreter of an environment."
            )
        self._variables = dict(variables or {})
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._asking = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="unirl-scorer-")
        self._log = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_made = self._is_closed = False
        self._begin()

    @property
    def pid(self) -> int | None:
        """The process, which is also its process group; None after `close`."""
        return None if self._process is None else self._process.pid

    def score(self, request: RewardRequest) -> RewardResponse:
        """Rewards float32 [B]; a sample without one has its reason.

        Raises ConfigError if the scorer cannot be made, RewardError if the process dies of the request or is late,
        ContractError for media that cannot be sent (see `unirl.reward.wire.samples_of`), and what the scorer raises.
        """
        body = b"".join(encode_binary(samples_of(request), [self.name]))
        if self._is_closed:
            raise RewardError(f"scorer {self.name} is closed")
        with self._asking:
            answer = self._answer(body)
        return decode_answer(answer, request.sample_ids, [self.name], UNLIMITED)[self.name]

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._is_closed = True
        self._end()
        self._folder.cleanup()

    # ----------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        settings = [f"{name}={value}" for name, value in self._variables.items()]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["env", *settings, self._python, "-m", "unirl.reward.child.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the trainer alone
            )
        theirs.close()
        self._is_made = False
        with contextlib.suppress(OSError):  # it died, which the first request finds
            self._pipe.send_bytes(self._start.encode())

    def _answer(self, body: bytes) -> bytes:
        """The child's answer, from another process if one dies."""
        process = self._process
        if self._is_made and process is not None and process.poll() is not None:
            logger.warning("scorer %s: its idle process %s Another one takes its place.", self.name, self._death()[1])
        for deaths in range(1, _MAX_DEATHS + 1):
            try:
                if self._process is None:
                    self._begin()
                if not self._is_made:
                    made = self._received("makes the scorer", self._start_timeout_s, "start_timeout_s")
                    self._check_groups(made == COMPARES_GROUPS)
                    self._is_made = True
                self._pipe_of().send_bytes(body)
                return self._received("scores", self._timeout_s, "timeout_s")
            except (EOFError, OSError) as error:
                was_killed, death = self._death()
                if not self._is_made and not (was_killed and deaths < _MAX_DEATHS):
                    raise ConfigError(
                        f"scorer {self.name}: before it made the scorer, the process of {self._python} {death} Its "
                        "environment needs unirl-reward and what the scorer imports."
                    ) from error
                if deaths == _MAX_DEATHS:
                    raise RewardError(
                        f"scorer {self.name}: {deaths} processes died of one request. It {death}"
                    ) from error
                logger.warning("scorer %s: its process %s Another one scores these samples.", self.name, death)
        raise AssertionError("the loop returns or raises")

    def _check_groups(self, compares_groups: bool) -> None:
        if compares_groups and not self.is_groupwise:
            self._end()
            raise ConfigError(
                f"scorer {self.name}: {self._start.scorer} compares the samples of a prompt, which must come together. "
                "Set groupwise: true."
            )

    def _received(self, doing: str, timeout_s: float, key: str) -> bytes:
        """The next answer. Raises what the child raised, and EOFError or OSError if it died."""
        if not self._pipe_of().poll(timeout_s):
            tail = self._tail()
            self._end()
            raise RewardError(
                f"scorer {self.name}: its process {doing} for more than {timeout_s:g} s, so it was ended. If the work "
                f"is that long, raise {key}. {tail}"
            )
        answer = self._pipe_of().recv_bytes()
        if answer[:1] == FAILED:
            raise self._raised(Failure.decode(answer[1:]))
        return answer[1:]

    def _raised(self, failure: Failure) -> Exception:
        kind = vars(errors).get(failure.kind)
        if not self._is_made:
            self._end()
        if isinstance(kind, type) and issubclass(kind, UniRLError) and kind is not WorkerError:
            return kind(failure.text)
        what = f"scorer {self.name} raised {failure.kind}: {failure.text}\n{failure.trace}"
        return RewardError(what) if self._is_made else ConfigError(what)

    def _pipe_of(self) -> Connection:
        if self._pipe is None:
            raise EOFError
        return self._pipe

    def _death(self) -> tuple[bool, str]:
        """True if a signal ended the process, which may strike a sound one, and how it ended; it is replaced by
        the next request."""
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None:
                process.wait(_LEAVE_TIMEOUT_S)
        code = None if process is None else process.poll()
        how = "is gone" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        tail = self._tail()
        self._end()
        return code is not None and code < 0, f"{how}. {tail}"

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            if text := self._log.read_text(errors="replace")[-_TAIL_CHARS:].strip():
                return f"The end of its log:\n{text}\n"
        return "It left no log."

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
