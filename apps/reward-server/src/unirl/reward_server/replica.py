"""The server's side of one replica: its process, and calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unirl.reward.wire import WireSample, encode_binary
from unirl.reward_server.frames import Frame, read_frame, write_frame
from unirl.reward_server.settings import RewardSettings
from unirl.types.device_kinds import ACCELERATOR, CPU, KINDS

logger = logging.getLogger(__name__)

Found = dict[str, float] | str
"""Numbers of one sample, or the reason why it has none."""


class ReplicaDied(Exception):
    """The process ended before it answered."""


class ReplicaFailed(Exception):
    """The scorer cannot be built. is_final: the configuration or the environment must change, trying again is vain."""

    def __init__(self, text: str, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


class Replica(Protocol):
    """What a pool needs of a replica."""

    card: Mapping[str, Any]  # Any: JSON values
    """What the scorer says about itself; filled by `start`."""
    pid: int | None

    async def start(self) -> None:
        """Return when warm. Raises ReplicaFailed, or ReplicaDied if the process ended."""
        ...

    async def score(self, samples: Sequence[WireSample]) -> list[Found]:
        """One entry per sample. Raises ReplicaDied. Cancelling the call cancels the work."""
        ...

    async def died(self) -> None:
        """Return when the process has ended."""
        ...

    async def stop(self) -> None:
        """End the process, whatever it does."""
        ...


class ProcessReplica:
    """A replica in its own process, reached over a socket pair that no other process can open."""

    def __init__(self, settings: RewardSettings, gpus: Sequence[str], start_timeout_s: float) -> None:
        self.card: Mapping[str, Any] = {}
        self.pid: int | None = None
        self._settings = settings
        self._gpus = gpus
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._link: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[list[Found]]] = {}
        self._next_task = 1

    async def start(self) -> None:
        """Spawn the process and wait until its scorer is warm."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *worker_command(self._settings),
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_number(sys.stderr) else asyncio.subprocess.DEVNULL,
                env=worker_environment(self._settings, self._gpus),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ReplicaFailed(f"cannot start {worker_command(self._settings)[0]}: {error.strerror}", True) from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        ours.setblocking(False)
        self._link = ours
        told = told_to_worker(self._settings)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._send(Frame.START, 0, [json.dumps(told).encode()])
                kind, _, payload = await read_frame(ours)
        except TimeoutError as error:
            await self.stop()
            raise ReplicaFailed(f"not loaded within start_timeout_s = {self._start_timeout_s} s", False) from error
        except (EOFError, OSError) as error:
            await self.stop()
            raise ReplicaDied(f"its process ended with code {self._process.returncode} while it loaded") from error
        content = json.loads(bytes(payload))
        if kind == Frame.FAILED:
            await self.stop()
            raise ReplicaFailed(f"{content['kind']}: {content['text']}", content["is_final"])
        self.card = content
        self._reading = asyncio.create_task(self._read_answers(ours))

    async def score(self, samples: Sequence[WireSample]) -> list[Found]:
        """One entry per sample."""
        task, self._next_task = self._next_task, self._next_task % (2**32 - 1) + 1
        answer: asyncio.Future[list[Found]] = asyncio.get_running_loop().create_future()
        # Where sending fails first, the answer is not awaited; asking for its exception marks that as meant.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[task] = answer
        try:
            await self._send(Frame.SCORE, task, encode_binary(samples, [self._settings.name]))
            return await answer
        except OSError as error:
            raise ReplicaDied("its process closed the connection") from error
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, ReplicaDied):
                await self._send(Frame.CANCEL, task, [])
            raise
        finally:
            self._waiting.pop(task, None)

    async def died(self) -> None:
        """Return when the process has closed its end."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def stop(self) -> None:
        """Kill the process with its children and wait for its end. A scorer has nothing to save."""
        if self._link is not None:
            with contextlib.suppress(OSError):  # the other side may have closed it
                self._link.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            # The session: `uv run` and data loaders are separate processes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        ends = [*self._writing, *([self._reading] if self._reading is not None else [])]
        if ends:
            await asyncio.wait(ends)
        if self._link is not None:
            self._link.close()

    async def _send(self, kind: Frame, task: int, payload: Sequence[bytes | memoryview]) -> None:
        """A cancelled writer still sends its whole frame: half of one would garble those after it."""
        writing = asyncio.create_task(self._write(kind, task, payload))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    async def _write(self, kind: Frame, task: int, payload: Sequence[bytes | memoryview]) -> None:
        async with self._turn:
            if self._link is None:
                raise ReplicaDied("it was not started")
            await write_frame(self._link, kind, task, payload)

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # read, so that asyncio does not log it; who awaits it gets it

    async def _read_answers(self, link: socket.socket) -> None:
        try:
            while True:
                _, task, payload = await read_frame(link)
                answer = self._waiting.get(task)
                if answer is not None and not answer.done():
                    answer.set_result(json.loads(bytes(payload)))
        except (EOFError, OSError) as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ReplicaDied(f"its process ended: {error or 'connection lost'}"))


def told_to_worker(settings: RewardSettings) -> dict[str, Any]:  # Any: JSON values
    """What to build, for `worker.prepared`."""
    return {
        "name": settings.name,
        "target": settings.target,
        "params": dict(settings.params),
        "device": ACCELERATOR if settings.num_gpus else CPU,
        "num_cpus": settings.num_cpus,
        "max_concurrency": settings.max_concurrency,
        "warm_up": settings.warm_up,
    }


def worker_command(settings: RewardSettings) -> list[str]:
    """The program and first arguments of a reward's replicas."""
    module = ["-m", "unirl.reward_server.worker"]
    if settings.python is not None:
        return [settings.python, *module]
    if settings.runtime_env is None and not settings.packages:
        return [sys.executable, *module]
    # The environment of the server, with more in front: uv lays it over the site-packages of this interpreter.
    # `uv run` names itself in UV: it may have been started by its full path.
    command = [os.environ.get("UV", "uv"), "run", "--no-project", "--python", sys.executable]
    if settings.runtime_env is not None:
        command += ["--with-requirements", settings.runtime_env]
    for requirement in settings.packages:
        command += ["--with", requirement]
    return [*command, "python", *module]


def worker_environment(settings: RewardSettings, gpus: Sequence[str]) -> dict[str, str]:
    """This process' environment without its token, with the replica's own GPUs and threads."""
    threads = str(max(1, int(settings.num_cpus)))
    kept = {key: value for key, value in os.environ.items() if key != "REWARD_SERVER_TOKEN"}
    # Of every kind: which one this machine has, only torch knows, which the server need not load.
    visible = {kind.visible: ",".join(gpus) for kind in KINDS.values() if kind.visible is not None}
    return kept | visible | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _has_number(stream: Any) -> bool:  # Any: tests replace stderr by objects without a file
    try:
        stream.fileno()
    except (AttributeError, OSError):
        return False
    return True
