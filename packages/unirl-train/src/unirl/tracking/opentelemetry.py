"""What worked when, as OpenTelemetry traces: one per rollout, with a span per piece of work of every part and pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unirl.tracking.base import Config, Summary, WithoutSamples
from unirl.tracking.libraries import library_of
from unirl.types.bounds import Positive, bounded

EXPORTERS = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

logger = logging.getLogger(__name__)


@bounded("trackers.opentelemetry")
class OpenTelemetryTracker(WithoutSamples):
    """Sends traces by OTLP over HTTP to a collector, or to what takes them itself (Jaeger, Tempo, ...).

    endpoint: where traces are posted; None: `OTEL_EXPORTER_OTLP_ENDPOINT` and its relatives, else port 4318 of this
    machine. headers: sent along, such as a key. timeout_s: for each attempt, and for what is left at the end.
    Every lane of the timeline is an instance of the service `unirl`. The trace of a rollout has the spans that ended
    since the one before; they say which rollout they are about. Needs the extra `opentelemetry`. A collector that does
    not answer is said once; the run continues.
    """

    def __init__(
        self, endpoint: str | None = None, headers: Mapping[str, str] | None = None, timeout_s: Positive = 10.0
    ) -> None:
        library_of("unirl.tracking.opentelemetry.OpenTelemetryTracker")
        self._options = {"endpoint": endpoint, "headers": dict(headers or {}), "timeout": timeout_s}
        self._timeout_s = timeout_s
        self._processor: Any = None  # Any: a class of the library
        self._tracers: dict[str, Any] = {}
        self._run: dict[str, str] = {}

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Connect to nothing yet: spans are sent in the background as they come."""
        self.close()
        sdk, exporters = import_module("opentelemetry.sdk.trace.export"), import_module(EXPORTERS)
        # The library repeats itself for every batch; `_Once` says it once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._run = {"unirl.recipe": str(config["recipe"]), "unirl.run_dir": str(run_dir)}
        self._processor = sdk.BatchSpanProcessor(_once(exporters.OTLPSpanExporter(**self._options)))

    def _tracer(self, lane: str) -> Any:  # Any: a class of the library
        if lane not in self._tracers:
            sdk = import_module("opentelemetry.sdk.trace")
            resource = sdk.Resource.create({"service.name": "unirl", "service.instance.id": lane, **self._run})
            provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracers[lane] = provider.get_tracer("unirl")
        return self._tracers[lane]

    def timeline(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        """One trace with these lines of `timeline.jsonl`."""
        if self._processor is None or not lines:
            return
        in_context = import_module("opentelemetry.trace").set_span_in_context
        begin, end = min(line["begin"] for line in lines), max(line["end"] for line in lines)
        root = self._tracer("run").start_span(f"rollout {step}", start_time=_ns(begin), attributes={"unirl.step": step})
        for line in lines:
            about = {f"unirl.{name}": line[name] for name in ("rollout", "request", "version") if name in line}
            span = self._tracer(line["lane"]).start_span(
                line["what"], in_context(root), start_time=_ns(line["begin"]), attributes=about
            )
            span.end(_ns(line["end"]))
        root.end(_ns(end))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Traces have no metrics."""

    def alert(self, name: str, text: str, step: int) -> None:
        """Traces have no alarms."""

    def finish(self, summary: Summary) -> None:
        """Nothing: `close` sends what is left."""

    def close(self) -> None:
        """Send what is left, for at most `timeout_s`."""
        if self._processor is not None:
            self._processor.force_flush(int(1000 * self._timeout_s))
            self._processor.shutdown()
        self._processor, self._tracers = None, {}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _once(exporter: Any) -> Any:  # Any: a class of the library
    """`exporter`, which says once that it cannot send, and again after it could."""
    export, has_failed = exporter.export, False

    def said(spans: Sequence[Any]) -> Any:
        nonlocal has_failed
        result = export(spans)
        fails = result.name != "SUCCESS"
        if fails and not has_failed:
            logger.error(
                "traces cannot be sent to %s (trackers.opentelemetry.endpoint). The run continues without them.",
                exporter._endpoint,
            )
        has_failed = fails
        return result

    exporter.export = said
    return exporter
