"""An SGLang server, started here or already running, and its HTTP interface."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.rollout.engine.process_group import end_group, shared_memory
from unirl.rollout.engine.process_log import end_of_log
from unirl.rollout.engine.start_progress import start_progress
from unirl.types.errors import WorkerError, as_sentence

_BAD_REQUEST = 400
_POLL_S = 1.0
_LEAVE_TIMEOUT_S = 20.0
_KEEPER = "unirl.rollout.engine.sglang_llm.keeper"


class BadRequest(WorkerError):
    """The server takes no part of a request, and says why."""


class SGLangServer:
    """Calls to one server. `command` starts it as a child process, which ends with `stop` or with this process and then
    deletes `folder`; None connects to a running server."""

    def __init__(self, url: str, command: Sequence[str] | None, log: Path, folder: Path) -> None:
        self._url = url.rstrip("/")
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._is_up = False
        self._shared = set[int]()
        """Shared memory of its processes, recorded once it is up, since some of them may die before the end."""
        if command is not None:
            theirs, lifeline = os.pipe()
            self._lifeline = lifeline
            with log.open("wb") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", _KEEPER, str(theirs), str(folder), *command],
                    pass_fds=[theirs],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the server in order
                )
            os.close(theirs)

    @property
    def pid(self) -> int | None:
        """Process id, which is also the process group id; None for a server that we did not start."""
        return None if self._child is None else self._child.pid

    @property
    def name(self) -> str:
        """The server, as errors call it."""
        return f"SGLang at {self._url}" if self._child is None else f"SGLang (pid {self._child.pid})"

    @property
    def is_alive(self) -> bool:
        """True if its process runs, and always for a server that we did not start."""
        return self._child is None or self._child.poll() is None

    @property
    def death(self) -> str:
        """How its process ended, with the end of its log; empty if it runs or we did not start it."""
        code = None if self._child is None else self._child.poll()
        return "" if code is None else f"its process ended with status {code}. {self._tail()}"

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises WorkerError if it dies or takes longer."""
        with start_progress(self.name, self._log):
            self._wait_until_ready(timeout_s)

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health_generate", _POLL_S * 20)
                self._is_up = True
                if self._child is not None:
                    self._shared = shared_memory(self._child.pid)
                return
            except WorkerError as error:
                if self._child is not None and self._child.poll() is not None:
                    raise WorkerError(
                        f"SGLang (pid {self._child.pid})",
                        f"the server ended with status {self._child.returncode} while it started. {self._tail()}",
                    ) from error
                if time.monotonic() > deadline:
                    self.stop()
                    raise WorkerError(
                        f"SGLang at {self._url}",
                        f"not ready within {timeout_s:.0f} s ({error.traceback_text}). Raise engine.start_timeout_s. "
                        f"{self._tail()}",
                    ) from error
            time.sleep(_POLL_S)

    def get(self, path: str, timeout_s: float) -> Any:  # Any: JSON
        """GET; returns the answer's JSON, or None if it is not JSON."""
        return self._open(urllib.request.Request(self._url + path), path, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:  # Any: JSON
        """POST a JSON body; returns the answer's JSON, or None if it is not JSON. Never retried.

        An answer with {"success": false} is returned, whatever its status. Otherwise raises WorkerError with the status
        and the server's message (BadRequest for status 400), or with the reason why it cannot be reached.
        """
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        return self._open(request, path, timeout_s)

    def stop(self) -> None:
        """Kill the server and its children, if we started it; its folder stays. Safe to call twice."""
        if self._child is None:
            return
        end_group(self._child.pid, self._shared)
        self._child.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _open(self, request: urllib.request.Request, path: str, timeout_s: float) -> Any:  # Any: JSON
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=timeout_s) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:2000]
            with contextlib.suppress(ValueError):
                refusal = json.loads(said)
                if isinstance(refusal, dict) and refusal.get("success") is False:
                    return refusal
            kind = BadRequest if error.code == _BAD_REQUEST else WorkerError
            raise kind(self.name, f"{path} answered {error.code}: {said}") from error
        except TimeoutError as error:
            raise self._late(path, timeout_s) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise self._late(path, timeout_s) from error
            raise WorkerError(self.name, f"{path} failed: {as_sentence(error)}{self._end()}") from error
        with contextlib.suppress(ValueError):
            return json.loads(data)
        return None

    def _late(self, path: str, timeout_s: float) -> WorkerError:
        """The timeout error; a server that we started is stopped if it was up."""
        stopped = ""
        if self._is_up and self._child is not None:
            self.stop()
            stopped = f", so it was stopped. If the work is that long, raise engine.timeout_s. {self._tail()}"
        return WorkerError(self.name, f"no answer to {path} within {timeout_s:.0f} s{stopped}")

    def _end(self) -> str:
        """How the process ended, as a sentence; empty if it runs or we did not start it."""
        if self._child is not None and self._is_up:  # the connection ends before the process does
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LEAVE_TIMEOUT_S)
        return f" {self.death[0].upper()}{self.death[1:]}" if self.death else ""

    def _tail(self) -> str:
        return end_of_log(self._log, f"its log {self._log}")
