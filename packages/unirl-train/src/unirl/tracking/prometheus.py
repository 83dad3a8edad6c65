"""What a run reports as a Prometheus endpoint, for dashboards and alarms next to those of a cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from http.server import HTTPServer
from pathlib import Path
from threading import Thread

from unirl.tracking.base import Config, Summary, WithoutSamples
from unirl.types.bounds import NonNegativeInt, bounded
from unirl.types.errors import ConfigError

_PHASE = re.compile(r"timing_s/(\w+)")
_POOL = re.compile(r"perf/pool/(?P<pool>.+)/(?P<what>busy_s|members|restarts)")
_SCORER = re.compile(r"reward/(?P<scorer>[^/]+)/mean")
_LAG = re.compile(r"schedule/lag/(newest|oldest)")


@bounded("trackers.prometheus")
class PrometheusTracker(WithoutSamples):
    """Serves `http://host:port/metrics` while the run lasts.

    host: address to serve at; 127.0.0.1 is this machine alone. port: 0 takes a free one. Every metric of a run is there
    as `unirl_metric{name=...}`; what dashboards and alarms need of all runs has a name and a type, see
    docs/guides/monitoring.md. Needs the extra `prometheus`. Raises ConfigError at the start for a port that is taken.
    """

    def __init__(self, host: str = "127.0.0.1", port: NonNegativeInt = 9464) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError("prometheus-client is not installed: pip install 'unirl-train[prometheus]'") from error
        self._client = prometheus_client
        self._address = (host, port)
        self._server: HTTPServer | None = None
        self._thread: Thread | None = None

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Serve the run's metrics from zero: Prometheus itself knows that a counter may begin again."""
        self.close()
        client = self._client
        registry = client.CollectorRegistry()
        client.ProcessCollector(namespace="unirl_driver", registry=registry)
        self._info = client.Info("unirl_run", "The run that is served.", registry=registry)
        self._info.info({"recipe": str(config["recipe"]), "run_dir": str(run_dir), "seed": str(config.get("seed"))})
        self._metric = client.Gauge(
            "unirl_metric", "A metric of docs/reference/metrics.md.", ["name"], registry=registry
        )
        self._rollouts = client.Gauge("unirl_rollouts", "Finished rollouts.", registry=registry)
        self._planned = client.Gauge("unirl_rollouts_planned", "Rollouts of the whole run.", registry=registry)
        self._last = client.Gauge("unirl_last_rollout_timestamp_seconds", "When the last one ended.", registry=registry)
        self._reward = client.Gauge(
            "unirl_reward_mean", "Mean reward, in all or of a scorer.", ["scorer"], registry=registry
        )
        self._phases = client.Counter("unirl_phase_seconds", "Wall time by phase.", ["phase"], registry=registry)
        self._pool_busy = client.Counter("unirl_pool_busy_seconds", "Wall time of calls.", ["pool"], registry=registry)
        self._members = client.Gauge("unirl_pool_members", "Members of a served pool.", ["pool"], registry=registry)
        self._restarts = client.Gauge("unirl_pool_restarts", "Members replaced so far.", ["pool"], registry=registry)
        self._lag = client.Gauge("unirl_staleness_versions", "Age of trained samples.", ["request"], registry=registry)
        self._pushed = client.Counter("unirl_pushed_bytes", "Bytes of weights sent to an engine.", registry=registry)
        self._alarms = client.Counter("unirl_alarms", "Alarms that began.", ["alarm"], registry=registry)
        self._rollouts.set(step)
        self._planned.set(float(config.get("num_rollouts") or 0))
        host, port = self._address
        try:
            self._server, self._thread = client.start_http_server(port, host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"trackers.prometheus cannot serve at {host}:{port}: {error.strerror}. Set trackers.prometheus.port to "
                "a free port (0 takes one) or trackers.prometheus.enabled: false."
            ) from error

    @property
    def port(self) -> int:
        """The port that is served. Raises ConfigError before the start."""
        if self._server is None:
            raise ConfigError("trackers.prometheus serves nothing yet")
        return self._server.server_address[1]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every metric, and count what adds up."""
        for name, value in metrics.items():
            self._metric.labels(name).set(value)
            if name == "reward/mean":
                self._reward.labels("").set(value)
            elif name == "sync/megabytes":
                self._pushed.inc(value * 1e6)
            elif found := _PHASE.fullmatch(name):
                self._phases.labels(found[1]).inc(max(0.0, value))
            elif found := _LAG.fullmatch(name):
                self._lag.labels(found[1]).set(value)
            elif found := _SCORER.fullmatch(name):
                self._reward.labels(found["scorer"]).set(value)
            elif found := _POOL.fullmatch(name):
                self._of_pool(found["pool"], found["what"], value)
        self._rollouts.set(step)
        self._last.set(time.time())

    def _of_pool(self, pool: str, what: str, value: float) -> None:
        if what == "busy_s":
            self._pool_busy.labels(pool).inc(value)
        else:
            (self._members if what == "members" else self._restarts).labels(pool).set(value)

    def alert(self, name: str, text: str, step: int) -> None:
        """Count the alarm."""
        self._alarms.labels(name).inc()

    def finish(self, summary: Summary) -> None:
        """Nothing: what was scraped stays in Prometheus."""

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
