"""A `reward-server` in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class RunningServer:
    """Where it listens, its process and its log."""

    url: str
    process: subprocess.Popen
    log: Path


@contextlib.contextmanager
def running_server(folder, service, *, code=0, **environment):
    """The server of a configuration text. It is stopped by SIGTERM, if it still runs, and must end with `code`."""
    (folder / "service.yaml").write_text(service)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "reward-server"), "--config", str(folder / "service.yaml")]
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            found = process.wait(120)
        finally:
            process.kill()
    assert found == code, log.read_text()
