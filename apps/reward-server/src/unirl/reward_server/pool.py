"""The queue and the replicas of one reward: batches across requests, retries, restarts, and rest when idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unirl.reward.wire import Kind, WireSample
from unirl.reward_server.job_queue import Job, JobQueue
from unirl.reward_server.metrics import RewardMetrics
from unirl.reward_server.replica import Found, Replica, ReplicaDied, ReplicaFailed
from unirl.reward_server.settings import RewardSettings

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "waiting", "offloaded", "stopped"]
"""`waiting`: it died or could not be built, and is started again after a while."""

End = Literal["useful", "useless", "rested"]
"""How a replica ended: after it had scored something, before, or because it was not needed."""

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
_STOP_TIMEOUT_S = 10.0


class QueueFull(Exception):
    """The samples do not fit. retry_after_s: when they may."""

    def __init__(self, text: str, retry_after_s: int) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(eq=False)
class ReplicaSlot:
    """Where a replica runs: what it was last, and what it is now."""

    state: State = "offloaded"
    replica: Replica | None = None
    num_restarts: int = 0
    problem: str | None = None
    """Why it is not ready."""
    in_work: int = 0


@dataclass(eq=False)
class RewardPool:
    """Scores samples of one reward on several replicas.

    make_replica: a new replica for a slot. Call `start` once, `close` at the end; all in one event loop.
    """

    settings: RewardSettings
    make_replica: Callable[[int], Replica]
    metrics: RewardMetrics
    score_timeout_s: float = 120.0
    first_backoff_s: float = FIRST_BACKOFF_S
    card: dict[str, Any] = field(default_factory=dict)  # Any: JSON values
    """What the scorer said about itself when it was last built."""

    def __post_init__(self) -> None:
        self.slots = [ReplicaSlot() for _ in range(self.settings.num_replicas)]
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set where a replica cannot be built and trying again will not help."""
        self._queue = JobQueue(self.settings.max_wait_ms / 1000, self.metrics)
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._last_use = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return self._queue.num_waiting

    @property
    def is_ready(self) -> bool:
        """True if a replica can score, or none has to before the first request."""
        states = [slot.state for slot in self.slots]
        return self.settings.load == "demand" or "ready" in states or all(state == "offloaded" for state in states)

    def start(self) -> None:
        """Start the replicas, or wait for the first request, as `load` says."""
        if self.settings.load == "start":
            self._want(True)
        self._tasks = [asyncio.create_task(self._keep_alive(i)) for i in range(len(self.slots))]
        if self.settings.idle_stop_s is not None:
            self._tasks.append(asyncio.create_task(self._rest_when_idle(self.settings.idle_stop_s)))

    async def close(self) -> None:
        """Stop every replica. Samples that wait are answered with a reason."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        for job in self._queue.waiting():
            self._finish(job, "the server is stopping")

    def check_room(self, num_samples: int) -> None:
        """Raises QueueFull if so many more samples would not fit."""
        if self._queue.num_waiting + num_samples > self.settings.max_queue:
            rate = self.metrics.samples_per_s()
            wait_s = round(self._queue.num_waiting / rate) if rate else 1
            raise QueueFull(
                f"reward {self.settings.name}: {self._queue.num_waiting} samples are waiting and {num_samples} more do "
                f"not fit into max_queue = {self.settings.max_queue}; try again later, or send fewer at a time",
                min(max(wait_s, 1), 60),
            )

    def refusal(self, kind: Kind) -> str | None:
        """Why the scorer cannot take a sample of a kind at all, by what it said when it was built."""
        kinds = self.card.get("media") or [kind]
        if kind in kinds:
            return None
        return f"reward {self.settings.name} scores {' and '.join(kinds)}, this sample is of kind {kind}"

    def submit(self, samples: Sequence[WireSample]) -> list[asyncio.Future[Found]]:
        """A future for every sample, of its numbers or of the reason why it has none. Call `check_room` before."""
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        futures = []
        call = object()  # other requests may have groups of the same name
        for sample in samples:
            job = Job(sample, loop.create_future(), now, (call, sample.group_id))
            if (reason := self.refusal(sample.kind)) is not None:
                futures.append(job.future)
                self._finish(job, reason)
                continue
            self._queue.add(job)
            futures.append(job.future)
        self._last_use = now
        self._want(True)
        self._queue.announce()
        return futures

    def _want(self, is_wanted: bool) -> None:
        on, off = (self._wanted, self._unwanted) if is_wanted else (self._unwanted, self._wanted)
        on.set()
        off.clear()

    async def _keep_alive(self, index: int) -> None:
        """Run the replicas of a slot, one after the other, until cancelled."""
        slot = self.slots[index]
        backoff_s = self.first_backoff_s
        try:
            while True:
                await self._wanted.wait()
                try:
                    end = await self._run_once(slot, index)
                except ReplicaFailed as error:
                    end, slot.problem = "useless", str(error)
                    if error.is_final:
                        self._give_up(str(error))
                        end = "useless" if self._wanted.is_set() else "rested"
                except ReplicaDied as error:
                    end, slot.problem = "useless", str(error)
                if end == "rested":
                    slot.state = "offloaded"
                    continue
                slot.num_restarts += 1
                self.metrics.restarted(slot.problem or "its process ended")
                backoff_s = self.first_backoff_s if end == "useful" else min(backoff_s * 2, MAX_BACKOFF_S)
                slot.state = "waiting"
                logger.warning(
                    "reward %s: replica %d ended (%s); starting again in %.1f s",
                    self.settings.name,
                    index,
                    slot.problem,
                    backoff_s,
                )
                await asyncio.sleep(backoff_s)
        finally:
            slot.state = "stopped"

    def _give_up(self, reason: str) -> None:
        """Answer whoever waits, where no replica is left to score."""
        if not self.failure.done():
            self.failure.set_result(f"reward {self.settings.name}: {reason}")
        if any(slot.state == "ready" for slot in self.slots):
            return
        if self.settings.load == "demand":
            self._want(False)  # the next request tries again, in case the environment has changed
        for job in self._queue.waiting():
            self._finish(job, f"its scorer cannot be loaded: {reason}")
        self._queue.forget()

    async def _run_once(self, slot: ReplicaSlot, index: int) -> End:
        """One replica from its start to its end."""
        slot.state = "starting"
        slot.replica = self.make_replica(index)
        done_before = self.metrics.num_batches
        workers: list[asyncio.Task[Any]] = []  # Any: their results are not read
        try:
            started = time.monotonic()
            logger.info("reward %s: loading replica %d", self.settings.name, index)
            await slot.replica.start()
            logger.info(
                "reward %s: replica %d can score after %.1f s", self.settings.name, index, time.monotonic() - started
            )
            self.card = dict(slot.replica.card)
            slot.state, slot.problem = "ready", None
            workers = [
                asyncio.create_task(self._work(slot, slot.replica)) for _ in range(self.settings.max_concurrency)
            ]
            resting = asyncio.create_task(self._unwanted.wait())
            died = asyncio.create_task(slot.replica.died())
            workers += [resting, died]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            for task in workers:
                if task.done():
                    task.result()
            if resting.done():
                return "rested"
            if died.done():
                slot.problem = "its process ended"
            return "useful" if self.metrics.num_batches > done_before else "useless"
        finally:
            # Work in flight ends by ReplicaDied, which puts its samples back; then nothing else is pulled.
            slot.state = "stopped" if self._is_closing else "waiting"
            await slot.replica.stop()
            for task in workers:
                task.cancel()
            if workers:
                await asyncio.wait(workers)
            slot.replica = None

    async def _work(self, slot: ReplicaSlot, replica: Replica) -> None:
        """Pull batches and score them until the replica dies."""
        while True:
            size = self.settings.max_batch or int(replica.card.get("batch_size", 8))
            jobs = await self._queue.next_batch(size, is_group=bool(replica.card.get("is_groupwise")))
            slot.in_work += len(jobs)
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.score_timeout_s):
                    await self._score(replica, jobs)
            except asyncio.CancelledError:
                self._put_back(jobs)
                raise
            except TimeoutError:
                slot.problem = f"a batch of {len(jobs)} took longer than score_timeout_s = {self.score_timeout_s:g} s"
                for job in jobs:
                    self._finish(job, f"not scored within {self.score_timeout_s:g} s")
                return
            except ReplicaDied as error:
                slot.problem = str(error)
                self._put_back(jobs)
                return
            finally:
                slot.in_work -= len(jobs)
            self.metrics.scored_batch(len(jobs), time.monotonic() - started)
            del jobs  # else their media stay until the next batch comes

    async def _score(self, replica: Replica, jobs: list[Job]) -> None:
        """Ask the replica, unless every waiting client leaves first."""
        call = asyncio.ensure_future(replica.score([job.sample for job in jobs]))
        left = len(jobs)

        def count(_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                call.cancel()

        for job in jobs:
            job.future.add_done_callback(count)
        try:
            found = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, ReplicaDied):
                await call
            me = asyncio.current_task()
            if left == 0 and me is not None and not me.cancelling():
                return
            raise
        finally:
            for job in jobs:
                job.future.remove_done_callback(count)
        for job, item in zip(jobs, found, strict=True):
            self._finish(job, item)

    def _finish(self, job: Job, found: Found) -> None:
        if not job.future.done():
            job.future.set_result(found)
            self.metrics.finished(found, time.monotonic() - job.since)

    def _put_back(self, jobs: list[Job]) -> None:
        """Give samples of a replica that died to another one, once, and each alone, or its group: one of them may have
        killed it."""
        for job in jobs:
            job.num_deaths += 1
            if job.future.done():
                continue
            if job.num_deaths > 1:
                self._finish(job, "two replicas ended while they scored this sample")
                continue
            self._queue.retry(job)
            self.metrics.retried()
        self._queue.announce()

    def forget(self) -> None:
        """Remove samples without a waiting client from the queue. Called after a request has left."""
        self._queue.forget()

    async def _rest_when_idle(self, idle_s: float) -> None:
        """Stop the replicas after `idle_s` seconds without work."""
        while True:
            await asyncio.sleep(max(0.05, idle_s - (time.monotonic() - self._last_use)))
            if self._queue.num_waiting or any(slot.in_work for slot in self.slots):
                self._last_use = time.monotonic()
            elif time.monotonic() - self._last_use >= idle_s and self._wanted.is_set():
                logger.info("reward %s: idle for %g s, replicas stop", self.settings.name, idle_s)
                self._want(False)
