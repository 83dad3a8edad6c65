"""Runs a command that ends with the process that started it: `python -m ... FD FOLDER COMMAND...`.

When the pipe FD closes, the command and all processes that it started are killed, and FOLDER is deleted; a killed
trainer can do neither. If the command ends first, exits with its status. Imports little more than the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

from unirl.rollout.engine.process_group import end_group


def _end_with(descriptor: int, folder: str) -> None:
    os.read(descriptor, 1)  # nothing is ever written: it returns when the other end is gone
    shutil.rmtree(folder, ignore_errors=True)
    end_group(os.getpgrp())


def main(descriptor: int, folder: str, command: list[str]) -> int:
    """Run the command in this process group; returns its status, 128 + signal number if a signal ended it."""
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # from a scheduler; the trainer decides when to end
    threading.Thread(target=_end_with, args=(descriptor, folder), daemon=True).start()
    with subprocess.Popen(command) as child:
        status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
