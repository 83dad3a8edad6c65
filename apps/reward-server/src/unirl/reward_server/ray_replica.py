"""A replica as a Ray actor, on whichever node of a cluster has room for it. Needs the extra `ray`.

Clients' samples reach an actor as the bytes of a binary body, which nothing unpickles; Ray pickles the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # before the import; else every worker builds a venv
import ray
from ray.exceptions import RayActorError, RayError

from unirl.reward.wire import UNLIMITED, WireSample, decode_binary, encode_binary
from unirl.reward_server.replica import Found, ReplicaDied, ReplicaFailed, told_to_worker, worker_command
from unirl.reward_server.settings import ClusterSettings, RewardSettings
from unirl.reward_server.worker import Judge, prepared
from unirl.types.errors import ConfigError, as_sentence


@contextlib.contextmanager
def connected(cluster: ClusterSettings) -> Generator[None]:
    """Be a driver of the cluster for a while; a connection that this process has already is used and left.

    Raises ConfigError if there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=cluster.ray_address, namespace=cluster.namespace)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.ray_address = {cluster.ray_address!r}: {as_sentence(error)} Start a node with "
            "`ray start --head`, or leave `cluster` out to run on this machine alone."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class RayReplica:
    """A replica in an actor. Ray chooses its node and its GPUs."""

    def __init__(self, settings: RewardSettings, start_timeout_s: float) -> None:
        self.card: Mapping[str, Any] = {}  # Any: JSON values
        self.pid: int | None = None
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None  # Any: a handle that Ray makes of the class
        self._next_task = 1

    async def start(self) -> None:
        """Create the actor and wait until its scorer is warm."""
        settings = self._settings
        remote: Any = ray.remote(Actor)  # Any: Ray adds what its type does not say
        self._actor = remote.options(
            num_cpus=settings.num_cpus,
            num_gpus=settings.num_gpus,
            # As many batches in work as are being cancelled, `cancel`, and `stay`.
            max_concurrency=2 * settings.max_concurrency + 2,
            scheduling_strategy="SPREAD" if settings.scheduling == "spread" else "DEFAULT",
            runtime_env=environment_of(settings),
        ).remote()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                found = await self._actor.prepare.remote(told_to_worker(settings))
        except TimeoutError as error:
            raise ReplicaFailed(
                f"not loaded within start_timeout_s = {self._start_timeout_s} s; the cluster may lack num_cpus = "
                f"{settings.num_cpus:g} and num_gpus = {settings.num_gpus:g}",
                False,
            ) from error
        except RayActorError as error:
            raise ReplicaDied(f"its actor ended while it loaded: {error}") from error
        told = found["told"]
        if not found["is_ready"]:
            raise ReplicaFailed(f"{told['kind']}: {told['text']}", told["is_final"])
        self.card, self.pid = told, found["pid"]

    async def score(self, samples: Sequence[WireSample]) -> list[Found]:
        """One entry per sample."""
        task, self._next_task = self._next_task, self._next_task + 1
        body = b"".join(encode_binary(samples, [self._settings.name]))
        try:
            return json.loads(await self._actor.score.remote(task, body))
        except asyncio.CancelledError:
            self._actor.cancel.remote(task)
            raise
        except RayError as error:
            raise ReplicaDied(f"its actor ended: {type(error).__name__}") from error

    async def died(self) -> None:
        """Return when the actor has ended."""
        with contextlib.suppress(RayError):
            await self._actor.stay.remote()

    async def stop(self) -> None:
        """End the actor, whatever it does."""
        if self._actor is not None:
            ray.kill(self._actor)


class Actor:
    """What runs on the other node: a judge, and the tasks that were cancelled."""

    def __init__(self) -> None:
        self._judge: Judge | None = None
        self._turns = threading.Semaphore(1)
        self._cancelled: dict[int, threading.Event] = {}

    def prepare(self, told: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
        """{"told", "is_ready", "pid"}: the scorer's card, or why it cannot be built, as `worker.prepared` says it."""
        self._judge, card = prepared(told)
        self._turns = threading.Semaphore(told["max_concurrency"])
        return {"told": card, "is_ready": self._judge is not None, "pid": os.getpid()}

    def score(self, task: int, body: bytes) -> bytes:
        """JSON of numbers or a reason for every sample; fewer where the task was cancelled."""
        if self._judge is None:
            raise RuntimeError("score before prepare")
        cancelled = self._cancelled[task] = threading.Event()
        try:
            with self._turns:
                found = self._judge.found(decode_binary(body, UNLIMITED).samples, cancelled)
                return json.dumps([item for chunk in found for item in chunk]).encode()
        finally:
            del self._cancelled[task]

    def cancel(self, task: int) -> None:
        """Stop the task before its next samples, if it is still in work."""
        if task in self._cancelled:
            self._cancelled[task].set()

    def stay(self) -> None:
        """Never return, so that the end of the actor is seen."""
        threading.Event().wait()


def environment_of(settings: RewardSettings) -> dict[str, Any]:  # Any: Ray's own values
    """Ray's runtime_env: the interpreter that a process of this reward would have, and its threads."""
    threads = str(max(1, int(settings.num_cpus)))
    *interpreter, _, _ = worker_command(settings)
    return {
        "py_executable": shlex.join(interpreter),
        "env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    }
