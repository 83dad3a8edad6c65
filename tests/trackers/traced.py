"""Sends the timeline of two rollouts to a collector, then to none. Run by the interpreter of
environments/trackers: traced.py FOLDER; prints what the collector was sent, as JSON."""

import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from unirl.distributed.spans import Span
from unirl.tracking.opentelemetry import OpenTelemetryTracker
from unirl.trainer.timeline import Timeline

CONFIG = {"recipe": "worlds/test", "seed": 1, "resume": None}
SPANS = [
    [
        Span("engine", "rollout", 0.0, 2.0, {"rollout": 0}),
        Span("pool/rollout-1", "engine.generate", 0.5, 1.5),
        Span("learner", "train", 2.0, 3.5, {"rollout": 0}),
    ],
    [Span("engine", "rollout", 3.5, 4.0, {"rollout": 1, "request": 2, "version": 1})],
]


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    sent = []

    def do_POST(self):
        """OTLP over HTTP."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent.append((self.path, self.headers["x-key"], ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):  # noqa: A002 (the name of the standard library)
        """Quiet."""


def report(tracker, folder):
    """Seconds that closing took."""
    timeline = Timeline(folder / "timeline.jsonl")
    tracker.start(CONFIG, folder, 0)
    for step, spans in enumerate(SPANS, start=1):
        tracker.timeline(timeline.write(spans, step), step)
    begin = time.monotonic()
    tracker.close()
    return time.monotonic() - begin


def value(attribute):
    """What an attribute holds, whatever its kind."""
    return getattr(attribute.value, attribute.value.WhichOneof("value"))


def spans_of(requests):
    """Every span with its lane, its parent's name and its own seconds."""
    found, names = [], {}
    for request in requests:
        for resource in request.resource_spans:
            about = {each.key: value(each) for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    names[span.span_id] = span.name
                    found.append((about, span))
    begin = min(span.start_time_unix_nano for _, span in found)
    return [
        {
            "service": about["service.name"],
            "lane": about["service.instance.id"],
            "recipe": about["unirl.recipe"],
            "name": span.name,
            "parent": names.get(span.parent_span_id),
            "trace": sorted({each.trace_id.hex() for _, each in found}).index(span.trace_id.hex()),
            "begin": round((span.start_time_unix_nano - begin) / 1e9, 3),
            "end": round((span.end_time_unix_nano - begin) / 1e9, 3),
            "about": {each.key: value(each) for each in span.attributes},
        }
        for about, span in sorted(found, key=lambda pair: (pair[1].start_time_unix_nano, -pair[1].end_time_unix_nano))
    ]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    report(OpenTelemetryTracker(address, {"x-key": "k"}), Path(sys.argv[1]))
    server.shutdown()
    server.server_close()
    closing_s = report(OpenTelemetryTracker(address, timeout_s=1), Path(sys.argv[1]))
    found = {
        "paths": sorted({path for path, _, _ in Collector.sent}),
        "keys": sorted({key for _, key, _ in Collector.sent}),
        "spans": spans_of([request for _, _, request in Collector.sent]),
        "closing_s": closing_s,
    }
    print(json.dumps(found))
