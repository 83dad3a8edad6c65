"""A `reward-server` in its own process."""

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
    command = [str(Path(sys.executable).parent / "reward-server"), "--config", str(folder / "service.yaml")]
    log = folder / "log"
    with socket.socket() as holder, log.open("w") as stream:
        # Kept bound, so that no other process is given the port; a server, which may use it again, can listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
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
