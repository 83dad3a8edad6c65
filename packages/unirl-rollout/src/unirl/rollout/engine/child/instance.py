"""One instance of an engine: its process, its first message, calls, and restarts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.rollout.engine.child.messages import PROTOCOL, EngineReady, Message, MessageCodec, Start
from unirl.rollout.engine.child.process import EngineProcess
from unirl.rollout.engine.start_progress import start_progress
from unirl.types.errors import ConfigError, ContractError


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How an engine's process is started, and what its first message must say."""

    codec: MessageCodec
    python: str
    """Path of the interpreter."""
    module: str
    """Module that the interpreter runs; it calls `child.server.main`."""
    versions: tuple[str, ...]
    """Supported versions of the engine's package; a prefix such as "0.5" matches all that begin with it."""
    model: str
    engine_args: dict[str, Any]  # Any: options of the engine's own constructor
    policy_version: int
    check: Callable[[Message, int], None]
    """Takes (first message, process id); raises ConfigError if the engine does not meet the trainer's needs."""
    start_timeout_s: float
    timeout_s: float


class EngineInstance:
    """A process that starts with the object and loads in the background.

    variables: environment variables of this instance alone. folder: the instance's folder under `root`; the process
    deletes it when the trainer ends.
    """

    def __init__(self, launch: Launch, variables: Mapping[str, str], folder: Path, root: Path) -> None:
        self._launch = launch
        self._variables = variables
        self._folder = folder
        self._root = root
        self._ready: Any = None  # Any: the engine's own message
        self._process, self._start = self._started()

    @property
    def pid(self) -> int:
        """Id of the present process."""
        return self._process.pid

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return self._process.name

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.is_alive

    @property
    def death(self) -> str:
        return self._process.death

    def ready(self) -> Any:  # Any: the engine's own message
        """First message of the process, sent when its model is loaded; the first call waits for it. Raises ConfigError
        for an unsupported version, WorkerError if the process died."""
        if self._ready is None:
            launch = self._launch
            with start_progress(self._process.name, self._process.log):
                answer = self._process.answer(self._start, "start", launch.start_timeout_s)
            engine = launch.codec.engine
            if not isinstance(answer, EngineReady):
                raise ContractError(f"{engine}'s process began with {type(answer).__name__}")
            is_known = answer.version.partition("+")[0] in launch.versions  # 0.32.0+cpu is a build of 0.32.0
            if answer.protocol != PROTOCOL or not is_known:
                raise ConfigError(
                    f"the engine's environment has {engine} {answer.version} and speaks protocol "
                    f"{answer.protocol}; this unirl-rollout needs {engine} {', '.join(launch.versions)} and "
                    f"protocol {PROTOCOL}. Make the environment again, from the same sources."
                )
            launch.check(answer, self.pid)
            self._ready = answer
        return self._ready

    def call(self, message: Message) -> Message:
        """The answer to a message, see `EngineProcess.call`. May be called from several threads at once if the engine
        accepts several calls."""
        self.ready()
        return self._process.call(message, self._launch.timeout_s)

    def post(self, message: Message) -> None:
        """Send without waiting for an answer."""
        self._process.post(message)

    def restart(self) -> None:
        """Replace the process by a new one with the same start arguments."""
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ready = None
        self._process, self._start = self._started()

    def stop(self) -> None:
        """End the process. Safe to call twice."""
        self._process.stop()

    def _started(self) -> tuple[EngineProcess, Future[Message]]:
        launch = self._launch
        self._folder.mkdir(parents=True)
        process = EngineProcess(
            launch.codec,
            launch.python,
            self._variables,
            self._root,
            module=launch.module,
            log=self._folder / "log",
        )
        start = Start(launch.model, launch.engine_args, launch.policy_version, str(self._folder))
        return process, process.ask(start)
