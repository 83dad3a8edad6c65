"""Scoring in the background: each scorer has a queue and its own threads; a ticket names what was put in.

A queue cuts the samples of a ticket where scoring them all at once would cut them, at multiples of the scorer's batch
size, so that no value depends on how the samples arrived. For a scorer that compares groups it cuts between them.
"""

from __future__ import annotations

import contextlib
import logging
import queue as queues
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

import torch

from unirl.reward.base import LocalScorer
from unirl.reward.grouping import compares_groups, whole_groups
from unirl.types.batch import rows_by
from unirl.types.devices import current_stream, on_stream
from unirl.types.errors import ContractError
from unirl.types.protocols.rewards import ConcurrentScorer, Scorer
from unirl.types.reward import RewardRequest, RewardResponse

logger = logging.getLogger(__name__)

Ask = Callable[[RewardRequest], RewardResponse]

_LEAVE_TIMEOUT_S = 5.0
"""How long `close` waits for the batch that a queue is at; it cannot be interrupted."""


@dataclass(frozen=True)
class Ticket:
    """Stands for samples that were submitted to one service, in one process."""

    number: int


@dataclass(eq=False)
class Job:
    """Some samples on their way through a queue. Times are of `time.perf_counter`; 0 has not come yet."""

    request: RewardRequest | None
    """None once scored, so that the media can go."""
    stream: torch.Stream | None
    """Where the media are computed: scoring follows it."""
    num_samples: int
    submitted_s: float
    """When the first of them came."""
    started_s: float = 0.0
    finished_s: float = 0.0
    answer: Future[RewardResponse] = field(default_factory=Future)


class ScorerQueue:
    """Answers requests of one scorer in their order, `num_threads` at a time.

    ask: what a thread calls; what it raises comes out of the job's future.
    """

    def __init__(self, name: str, ask: Ask, num_threads: int = 1) -> None:
        self.name = name
        self.num_threads = num_threads
        self._ask = ask
        self._jobs: queues.SimpleQueue[Job | None] = queues.SimpleQueue()
        self._lock = threading.Lock()
        self._depth = 0
        self._is_closed = False
        # Daemons: a scorer that hangs must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Samples submitted and not scored yet."""
        return self._depth

    def submit(self, request: RewardRequest, since_s: float) -> Job:
        """Queue a request whose first samples came at `since_s`. Raises ContractError on a closed queue."""
        job = Job(request, current_stream(), len(request.sample_ids), since_s)
        with self._lock:
            if self._is_closed:
                raise ContractError(f"the reward service is closed; scorer {self.name} takes no more samples")
            self._depth += job.num_samples
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """Cancel what has not begun and end the threads. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(queues.Empty):
                while job := self._jobs.get_nowait():
                    job.answer.cancel()
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("scorer %s is still busy %.0f s after its service closed", self.name, _LEAVE_TIMEOUT_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._score(job)
            # An idle thread would keep the last job's media.
            del job

    def _score(self, job: Job) -> None:
        request, job.request = job.request, None
        job.started_s = time.perf_counter()
        try:
            if request is not None and job.answer.set_running_or_notify_cancel():
                with on_stream(job.stream):
                    result = self._ask(request)
                job.finished_s = time.perf_counter()
                job.answer.set_result(result)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the one who collects must see it)
            job.finished_s = time.perf_counter()
            job.answer.set_exception(error)
        finally:
            with self._lock:
                self._depth -= job.num_samples


class Stream:
    """The samples of one ticket on their way into one queue."""

    def __init__(self, queue: ScorerQueue, scorer: Scorer) -> None:
        self.jobs: list[Job] = []
        self._queue = queue
        self._batch_size = scorer.batch_size if isinstance(scorer, LocalScorer) else 1
        self._compares_groups = compares_groups(scorer)
        self._known_groups: set[str] = set()
        self._rest: RewardRequest | None = None
        self._since_s = 0.0
        self.max_depth = 0

    def add(self, request: RewardRequest) -> None:
        """Submit whole batches of what has come so far; the rest waits for more.

        Raises ContractError if groups are compared and a part of one comes after others have followed it.
        """
        came_s = time.perf_counter()
        if self._rest is None:
            whole, self._since_s = request, came_s
        else:
            whole = RewardRequest.concat([self._rest, request])
        size = len(whole.sample_ids)
        num_ready = self._num_whole(whole) if self._compares_groups else size // self._batch_size * self._batch_size
        if num_ready:
            self._submit(whole.slice(0, num_ready))
            self._since_s = came_s
        self._rest = whole.slice(num_ready, size) if num_ready < size else None

    def finish(self) -> None:
        """Submit the rest."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._submit(rest)

    def answer(self) -> RewardResponse:
        """The answers in order, joined. Blocks; raises what the first failed job raised."""
        return RewardResponse.concat([job.answer.result() for job in self.jobs])

    def cancel(self) -> None:
        """Give up what has not begun."""
        for job in self.jobs:
            job.answer.cancel()

    def utilisation(self) -> float:
        """Share of the time from the first submission to the last answer in which the queue scored this ticket."""
        span_s = max(job.finished_s for job in self.jobs) - self.jobs[0].submitted_s
        return self.busy_s() / (span_s * self._queue.num_threads) if span_s > 0 else 1.0

    def busy_s(self) -> float:
        """Seconds that the queue scored."""
        return sum(job.finished_s - job.started_s for job in self.jobs)

    def _num_whole(self, request: RewardRequest) -> int:
        """Leading samples of batches whose groups are complete. Groups of one sample are left: evaluations have such,
        and leave their comparison out."""
        ids = request.group_ids
        runs = [group for group, _ in groupby(ids)]
        if torn := self._known_groups.intersection(runs) or {group for group in runs if runs.count(group) > 1}:
            raise ContractError(f"samples of group {min(torn)} came apart, but scorer {self._queue.name} compares them")
        num = 0
        for part in whole_groups(ids, self._batch_size)[:-1]:
            if min(len(rows) for rows in rows_by(ids[row] for row in part).values()) == 1:
                break
            num += len(part)
        self._known_groups.update(ids[:num])
        return num

    def _submit(self, request: RewardRequest) -> None:
        self.jobs.append(self._queue.submit(request, self._since_s))
        self.max_depth = max(self.max_depth, self._queue.depth)


class ScorerQueues:
    """A queue for every scorer. ask: (scorer's name, request) -> its first answer."""

    def __init__(self, scorers: dict[str, Scorer], ask: Callable[[str, RewardRequest], RewardResponse]) -> None:
        self._scorers = scorers
        self._queues = {
            name: ScorerQueue(
                name,
                lambda request, name=name: ask(name, request),
                scorer.max_concurrency if isinstance(scorer, ConcurrentScorer) else 1,
            )
            for name, scorer in scorers.items()
        }

    def open(self) -> dict[str, Stream]:
        """Empty streams, one per scorer."""
        return {name: Stream(queue, self._scorers[name]) for name, queue in self._queues.items()}

    def close(self) -> None:
        """Close every queue."""
        for queue in self._queues.values():
            queue.close()


def gauges(streams: dict[str, Stream], collect_s: float) -> dict[str, float]:
    """How scoring kept up, once all is answered. collect_s: when the wait for it began.

    Names as in the metrics, without their `reward/`. Seconds, samples, and fractions.
    """
    jobs = [job for stream in streams.values() for job in stream.jobs]
    latency_s = [job.finished_s - job.submitted_s for job in jobs]
    num_samples = sum(job.num_samples for job in jobs)
    late = {name: [job for job in stream.jobs if job.finished_s > collect_s] for name, stream in streams.items()}
    return {
        "async/latency_s/mean": sum(s * job.num_samples for s, job in zip(latency_s, jobs, strict=True)) / num_samples,
        "async/latency_s/max": max(latency_s),
        "async/queue_depth/max": float(max(stream.max_depth for stream in streams.values())),
        "async/queue_depth/at_collect": float(max(sum(job.num_samples for job in late[name]) for name in streams)),
        "async/age_s": max((collect_s - job.submitted_s for name in streams for job in late[name]), default=0.0),
        "async/wait_s": max((job.finished_s - collect_s for name in streams for job in late[name]), default=0.0),
    } | {f"{name}/utilisation": stream.utilisation() for name, stream in streams.items()}
