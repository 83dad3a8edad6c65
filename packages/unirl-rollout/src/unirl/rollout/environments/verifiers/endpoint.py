"""An OpenAI-shaped endpoint on loopback whose answers are turns of the model that trains."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unirl.rollout.environments.verifiers.exchange import NotCarriedError, completion, events

SESSION = "X-Session-ID"
"""Header with the id of the episode's trace."""
Ask = Callable[[Mapping[str, Any]], dict[str, Any]]  # Any: JSON
"""Body of a request -> message of the answer. Raises NotCarriedError."""


class Endpoint:
    """Serves in threads of this process until it ends. A request is answered by who opened its session."""

    def __init__(self) -> None:
        self._sessions: dict[str, Ask] = {}
        sessions = self._sessions

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                ask = sessions.get(self.headers.get(SESSION, ""))
                if not self.path.endswith("/chat/completions"):
                    self._fail(f"{self.path} is not served, only /chat/completions: choose another harness")
                elif ask is None:
                    self._fail("the episode is over")
                else:
                    self._answer(json.loads(body), ask)

            def _answer(self, body: Mapping[str, Any], ask: Ask) -> None:  # Any: JSON
                try:
                    whole = completion(ask(body), str(body.get("model")))
                except NotCarriedError as error:
                    self._fail(str(error))
                    return
                if body.get("stream"):
                    self._send(200, "text/event-stream", events(whole))
                else:
                    self._send(200, "application/json", json.dumps(whole).encode())

            def _fail(self, why: str) -> None:
                error = {"error": {"message": why, "type": "invalid_request_error", "code": None, "param": None}}
                self._send(400, "application/json", json.dumps(error).encode())

            def _send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base
                """Say nothing of requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Base of the API."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def open(self, session: str, ask: Ask) -> None:
        """From now on requests of the session are answered by `ask`, in a thread of the request."""
        self._sessions[session] = ask

    def close(self, session: str) -> None:
        """Answer no more of its requests."""
        self._sessions.pop(session, None)
