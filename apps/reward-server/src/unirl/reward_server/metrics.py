"""What the server counts: Prometheus metrics, and the latest latencies for the status page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PERCENTILES = (50, 95, 99)

_NUM_RECENT = 1024
_RATE_WINDOW_S = 30.0


class Metrics:
    """Metrics of one server. Every server has its own registry, so that tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "reward_server_requests", "HTTP requests answered", ["path", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "reward_server_request_seconds", "Time of POST /score", buckets=SECONDS, registry=self.registry
        )
        self.body_bytes = Counter("reward_server_body_bytes", "Bodies of POST /score", ["body"], registry=self.registry)
        self.pending_bytes = Gauge(
            "reward_server_pending_bytes", "Bodies and media of requests in work", registry=self.registry
        )
        self.connections = Gauge("reward_server_connections", "Open connections", registry=self.registry)
        self.closed_connections = Counter(
            "reward_server_closed_connections",
            "Connections that the server closed, by reason: limit, header_timeout",
            ["reason"],
            registry=self.registry,
        )
        self.samples = Counter(
            "reward_server_samples", "Samples by outcome", ["reward", "outcome"], registry=self.registry
        )
        self.sample_seconds = Histogram(
            "reward_server_sample_seconds", "Arrival to score", ["reward"], buckets=SECONDS, registry=self.registry
        )
        self.queue_seconds = Histogram(
            "reward_server_queue_seconds", "Arrival to batch", ["reward"], buckets=SECONDS, registry=self.registry
        )
        self.batch_seconds = Histogram(
            "reward_server_batch_seconds", "Scoring of one batch", ["reward"], buckets=SECONDS, registry=self.registry
        )
        self.batch_samples = Histogram(
            "reward_server_batch_samples", "Samples of one batch", ["reward"], buckets=SIZES, registry=self.registry
        )
        self.restarts = Counter(
            "reward_server_replica_restarts", "Replicas that ended", ["reward"], registry=self.registry
        )
        self.waiting = Gauge("reward_server_waiting_samples", "Queue", ["reward"], registry=self.registry)
        self.replicas = Gauge(
            "reward_server_replicas", "Replicas by state", ["reward", "state"], registry=self.registry
        )
        self.problems: deque[tuple[float, str, str]] = deque(maxlen=50)
        """(Unix time, reward, text) of the latest failures."""

    def of(self, reward: str) -> RewardMetrics:
        """The part of one reward."""
        return RewardMetrics(self, reward)


class RewardMetrics:
    """What a pool reports."""

    def __init__(self, owner: Metrics, reward: str) -> None:
        self._owner = owner
        self._reward = reward
        self.num_batches = 0
        self.num_samples = 0
        self.num_failed = 0
        self._finished: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)
        """(time.monotonic() of the end, latency in seconds)."""
        self._batch_seconds = owner.batch_seconds.labels(reward)
        self._batch_samples = owner.batch_samples.labels(reward)
        self._queue_seconds = owner.queue_seconds.labels(reward)
        self._sample_seconds = owner.sample_seconds.labels(reward)
        self._scored = owner.samples.labels(reward, "scored")
        self._failed = owner.samples.labels(reward, "failed")

    def waited(self, seconds: Iterable[float]) -> None:
        """Samples left the queue for a batch."""
        for value in seconds:
            self._queue_seconds.observe(value)

    def scored_batch(self, num_samples: int, seconds: float) -> None:
        """A replica answered."""
        self.num_batches += 1
        self._batch_seconds.observe(seconds)
        self._batch_samples.observe(num_samples)

    def finished(self, found: dict[str, float] | str, seconds: float) -> None:
        """A sample has its numbers or a reason."""
        self.num_samples += 1
        self._finished.append((time.monotonic(), seconds))
        self._sample_seconds.observe(seconds)
        if isinstance(found, str):
            self.num_failed += 1
            self._failed.inc()
            self._owner.problems.append((time.time(), self._reward, found))
        else:
            self._scored.inc()

    def retried(self) -> None:
        """A sample goes to another replica."""
        self._owner.samples.labels(self._reward, "retried").inc()

    def restarted(self, reason: str) -> None:
        """A replica ended."""
        self._owner.restarts.labels(self._reward).inc()
        self._owner.problems.append((time.time(), self._reward, f"replica: {reason}"))

    def samples_per_s(self) -> float:
        """Over the last seconds; 0 where nothing was scored."""
        now = time.monotonic()
        recent = [end for end, _ in self._finished if now - end <= _RATE_WINDOW_S]
        return len(recent) / max(now - recent[0], 1.0) if recent else 0.0

    def latency_s(self) -> dict[str, float]:
        """Percentiles of the latest samples, seconds from arrival to score."""
        values = sorted(seconds for _, seconds in self._finished)
        if not values:
            return {}
        return {f"p{p}": values[min(len(values) - 1, len(values) * p // 100)] for p in PERCENTILES}
