"""An SGLang server: started here as a process, or already there; and its HTTP interface."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.types.errors import ConfigError, WorkerError

_POLL_S = 1.0
_LEAVE_TIMEOUT_S = 20.0
_LOG_TAIL_BYTES = 4000
_PORTS = range(20_000, 32_768)
"""Below the ports that Linux gives to whoever asks for any, and above those of Ray's workers."""
_KEEPER = "unirl.rollout.engine.sglang_llm.keeper"


def free_port() -> int:
    """A TCP port of this host that nothing listens on now, and that the system gives nobody who asks for any: a server
    takes minutes until it listens."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free. Set engine.port.")


class SGLangServer:
    """Calls to one server. `command` starts it as a process of ours, which ends with `stop` or with this process, and
    then takes the log's folder along; None takes a server that runs."""

    def __init__(self, url: str, command: Sequence[str] | None, log: Path) -> None:
        self._url = url.rstrip("/")
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        if command is not None:
            theirs, self._lifeline = os.pipe()
            with log.open("wb") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", _KEEPER, str(theirs), str(log.parent), *command],
                    pass_fds=[theirs],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops the server in order
                )
            os.close(theirs)

    @property
    def pid(self) -> int | None:
        """Of the process that is ours, also the id of the group of all that it starts; None for a server that ran."""
        return None if self._child is None else self._child.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it generates. Raises WorkerError where it dies or takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health_generate", _POLL_S * 20)
                return
            except WorkerError as error:
                if self._child is not None and self._child.poll() is not None:
                    raise WorkerError(
                        f"SGLang (pid {self._child.pid})",
                        f"the server ended with status {self._child.returncode} while it started. {self._tail()}",
                    ) from error
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"SGLang at {self._url}",
                        f"not ready within {timeout_s:.0f} s ({error.traceback_text}). Raise engine.start_timeout_s. "
                        f"{self._tail()}",
                    ) from error
            time.sleep(_POLL_S)

    def get(self, path: str, timeout_s: float) -> Any:  # Any: JSON
        """GET; the answer as JSON, or None where it is none."""
        return self._open(urllib.request.Request(self._url + path), path, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:  # Any: JSON
        """POST a JSON body; the answer as JSON, or None where it is none. Never tried twice.

        What answers {"success": false} is returned, whatever its status. Raises WorkerError with the status and what
        the server says, or with why it cannot be reached.
        """
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        return self._open(request, path, timeout_s)

    def stop(self) -> None:
        """End the process, if it is ours, and all that it started. Safe to call twice."""
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_LEAVE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        os.close(self._lifeline)

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
            raise WorkerError(f"SGLang at {self._url}", f"{path} answered {error.code}: {said}") from error
        except (OSError, TimeoutError) as error:
            alive = self._child is None or self._child.poll() is None
            end = "" if alive else f" Its process ended with status {self._child and self._child.returncode}."
            raise WorkerError(
                f"SGLang at {self._url}", f"{path} failed: {error}.{end} {self._tail() if not alive else ''}"
            ) from error
        with contextlib.suppress(ValueError):
            return json.loads(data)
        return None

    def _tail(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return f"The end of its log {self._log}:\n{log.read().decode(errors='replace')}"
        return ""
