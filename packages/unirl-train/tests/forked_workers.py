"""Ray workers forked from a process that has imported the frameworks: importing them takes longer than the tests.

Run as a program by Ray instead of the interpreter of a worker: hands its command line to `ForkedWorkers`. A worker
imports Ray itself: forked after its import, it never answers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Self


class ForkedWorkers:
    """Starts a worker for every process of Ray that asks at `command`."""

    def __init__(self, folder: str) -> None:
        # Here and below, since what Ray runs imports nothing that it can do without.
        import threading
        from multiprocessing.forkserver import ensure_running

        from ranks import forkserver

        self._context = forkserver()
        ensure_running()  # imports while Ray starts
        path = os.path.join(folder, "workers")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        self.command = f"{sys.executable} -I -S {os.path.abspath(__file__)} {path}"
        """For `runtime_env["py_executable"]`."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listening.accept()
            except OSError:  # closed
                return
            with asking, asking.makefile("r") as lines:
                self._context.Process(target=_become_worker, args=tuple(json.loads(lines.readline()))).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def _become_worker(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    import runpy

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Ask for a worker with this process's command line, environment and directory."""
    _, path, *arguments = sys.argv
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)
        asking.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n")


if __name__ == "__main__":
    main()
