"""The end of a process that plays episodes which starts it, sends it calls and kills it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment
from unirl.rollout.environments.process import Answered, Call, Raised
from unirl.rollout.environments.programs import end_programs, marking, new_mark
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest time in which a process loads its environment."""


@dataclass(frozen=True)
class Prototype:
    """The environment of a recipe on its way to the processes that play it, on this node or another one."""

    name: str
    """Its class, as errors call it."""
    pickled: bytes
    """The environment, and the memory that a process may have."""
    python: str | None
    """Interpreter of the processes; None: the one that starts them."""
    starts_programs: bool
    places: tuple[str, ...]
    """Where the processes import from, besides their own path."""

    @classmethod
    def of(cls, environment: Environment[Any, Any], memory_gb: float | None) -> Self:  # Any: of whatever acts
        """An environment as it is now. memory_gb: limit of each process; None: none."""
        memory_bytes = None if memory_gb is None else int(memory_gb * 2**30)
        # Another interpreter has its own libraries, which ours would hide.
        places = () if environment.python else tuple(place or str(Path.cwd()) for place in sys.path)
        return cls(
            name=type(environment).__name__,
            pickled=wire.packed((environment, memory_bytes)),
            python=environment.python,
            starts_programs=environment.starts_programs,
            places=places,
        )


class PlayingProcess:
    """One process. Raises ConfigError if this machine lacks its interpreter."""

    def __init__(self, prototype: Prototype) -> None:
        self._name = prototype.name
        if prototype.python is not None and not Path(prototype.python).is_file():
            raise ConfigError(
                f"{prototype.name}.python = {prototype.python} is no file on {socket.gethostname()}. Name an "
                "interpreter that is on every machine where its processes stand."
            )
        self._owner, theirs = Pipe()
        life, self._life = os.pipe()
        self._mark = new_mark() if prototype.starts_programs else None
        marked = [] if self._mark is None else marking(self._mark)
        command = [*marked, prototype.python or sys.executable, "-m", "unirl.rollout.environments.process"]
        self._child = subprocess.Popen(
            [*command, str(theirs.fileno()), str(life), self._mark or ""],
            pass_fds=[theirs.fileno(), life],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the trainer alone
        )
        theirs.close()
        os.close(life)
        wire.send(self._owner, prototype.places)
        self._owner.send_bytes(prototype.pickled)
        self.pid = self._child.pid

    @property
    def connection(self) -> Connection:
        """Becomes readable with each answer, and when the process dies."""
        return self._owner

    def require_ready(self) -> None:
        """Wait until it has loaded the environment. Raises ConfigError if it cannot; then it is killed."""
        try:
            said = self.answer() if self.connection.poll(START_TIMEOUT_S) else Raised("it says nothing")
        except (EOFError, OSError):
            said = Raised(f"its process {self.death()}")
        if isinstance(said, Raised):
            self.kill()
            raise ConfigError(f"a process for {self._name} did not start within {START_TIMEOUT_S:.0f} s: {said.reason}")

    def send(self, calls: Sequence[Call]) -> None:
        """Raises OSError if the process is dead."""
        wire.send(self._owner, list(calls))

    def answer(self) -> Answered | Raised:
        """The next answer. Raises EOFError or OSError if the process is dead."""
        return wire.receive(self._owner)

    @property
    def has_ended(self) -> bool:
        """True if the process is dead."""
        return self._child.poll() is not None

    def death(self) -> str:
        """How it ended; waits for that."""
        code = self._child.wait()
        return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """Kill it and all that it started. Safe to call twice."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("process %d of environments had ended", self.pid)
        self._child.wait()
        if self._mark is not None:
            end_programs(self._mark)
        if not self._owner.closed:
            self._owner.close()
            os.close(self._life)
