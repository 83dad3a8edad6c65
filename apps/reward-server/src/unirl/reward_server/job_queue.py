"""The samples that wait for one reward, across requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass

from unirl.reward.wire import WireSample, batch_key
from unirl.reward_server.metrics import RewardMetrics
from unirl.reward_server.replica import Found

_MAX_BATCH_BYTES = 2**28
"""Media of one batch, one sample at least: a scorer makes floats of them, four times as much, and more."""


@dataclass(eq=False)
class Job:
    """One sample that waits for one reward. Cancelling the future takes it out of the queue."""

    sample: WireSample
    future: asyncio.Future[Found]
    since: float
    """time.monotonic() of its arrival."""
    group: object = None
    """Equal for the samples of one group of one request."""
    num_deaths: int = 0
    """Replicas that ended while they worked on it."""


class JobQueue:
    """Batches of samples that fit together, the longest waiting first; samples to be tried again come before, alone.

    max_wait_s: how long a sample waits for others of its kind.

    Attributes:
        num_waiting: samples in the queue.
    """

    def __init__(self, max_wait_s: float, metrics: RewardMetrics) -> None:
        self._max_wait_s = max_wait_s
        self._metrics = metrics
        self._queues: dict[object, deque[Job]] = {}
        self._retries: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._forming = asyncio.Lock()
        self.num_waiting = 0

    def add(self, job: Job) -> None:
        """A sample that has just come. Call `announce` after the last."""
        self.num_waiting += 1
        self._queues.setdefault(batch_key(job.sample), deque()).append(job)

    def retry(self, job: Job) -> None:
        """A sample whose replica died. Call `announce` after the last."""
        self.num_waiting += 1
        self._retries.append(job)

    def announce(self) -> None:
        """Wake who waits for a batch."""
        self._arrived.set()

    def waiting(self) -> list[Job]:
        """All of them."""
        return [*self._retries, *(job for jobs in self._queues.values() for job in jobs)]

    async def next_batch(self, batch_size: int, *, is_group: bool = False) -> list[Job]:
        """The next samples that fit together: as many as a batch takes, or fewer after `max_wait_ms`.

        is_group: instead all samples of one group, which came together, so that none waits for others.
        """
        wait_s = self._max_wait_s
        async with self._forming:
            while True:
                self._arrived.clear()
                if is_group:
                    if jobs := self._taken_group():
                        return jobs
                    await self._arrived.wait()
                    continue
                while self._retries:
                    job = self._retries.popleft()
                    self.num_waiting -= 1
                    if not job.future.done():
                        return [job]
                self._forget_cancelled()
                oldest = min(self._queues.values(), key=lambda jobs: jobs[0].since, default=None)
                if oldest is not None:
                    age_s = time.monotonic() - oldest[0].since
                    if len(oldest) >= batch_size or age_s >= wait_s:
                        return self._taken(oldest, batch_size)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if oldest is None else wait_s - age_s):
                        await self._arrived.wait()

    def _taken_group(self) -> list[Job]:
        """All samples of the group that has waited longest, one to be tried again first; none where nothing waits."""
        self.forget()
        waiting = [*self._retries] or [job for jobs in self._queues.values() for job in jobs]
        if not waiting:
            return []
        group = min(waiting, key=lambda job: job.since).group
        batch = [job for job in self.waiting() if job.group == group]
        self._retries = deque(job for job in self._retries if job.group != group)
        queues = {key: deque(job for job in jobs if job.group != group) for key, jobs in self._queues.items()}
        self._queues = {key: jobs for key, jobs in queues.items() if jobs}
        self.num_waiting -= len(batch)
        self._metrics.waited(time.monotonic() - job.since for job in batch)
        return batch

    def _taken(self, jobs: deque[Job], size: int) -> list[Job]:
        batch: list[Job] = []
        num_bytes = 0
        while jobs and len(batch) < size:
            num_bytes += jobs[0].sample.num_bytes
            if batch and num_bytes > _MAX_BATCH_BYTES:
                break
            job = jobs.popleft()
            self.num_waiting -= 1
            if not job.future.done():
                batch.append(job)
        self._metrics.waited(time.monotonic() - job.since for job in batch)
        return batch

    def _forget_cancelled(self) -> None:
        """Drop samples without a waiting client from the heads of the queues, and drop empty queues."""
        for key, jobs in list(self._queues.items()):
            while jobs and jobs[0].future.done():
                jobs.popleft()
                self.num_waiting -= 1
            if not jobs:
                del self._queues[key]

    def forget(self) -> None:
        """Remove samples without a waiting client from all queues. Called after a request has left."""
        live = {key: deque(job for job in jobs if not job.future.done()) for key, jobs in self._queues.items()}
        self._queues = {key: jobs for key, jobs in live.items() if jobs}
        self._retries = deque(job for job in self._retries if not job.future.done())
        self.num_waiting = sum(map(len, self._queues.values())) + len(self._retries)
