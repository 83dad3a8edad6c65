"""An engine process that shares memory with its child processes, as vLLM does with the ranks of a model, and maps
memory named by COMMON that the trainer has too. Its answer names the memory that is its own."""

import subprocess
import sys
from dataclasses import dataclass

from unirl.rollout.engine.child.messages import MessageCodec
from unirl.rollout.engine.child.server import main


@dataclass(frozen=True)
class Shared:
    """Answer to everything."""

    name: str
    semaphore: str
    rank: int
    """Process id."""


CODEC = MessageCodec("Memory", Shared)


RANK = """
import multiprocessing, os, signal, time
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
common = SharedMemory(os.environ["COMMON"])
memory = SharedMemory(create=True, size=64)
semaphore = multiprocessing.get_context("spawn").Semaphore()
os.kill(_resource_tracker._pid, signal.SIGKILL)  # which would free all three, also what is the trainer's
print(memory.name, semaphore._semlock.name, flush=True)
time.sleep(1000)
"""


class MemoryHost:
    """Starts a child process that holds the memory."""

    def __init__(self, start, aborts):
        self._rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True)
        assert self._rank.stdout is not None
        self._names = self._rank.stdout.readline().split()

    def ready(self):
        return Shared(*self._names, self._rank.pid)

    def answer(self, message):
        return self.ready()


if __name__ == "__main__":
    main(CODEC, MemoryHost)
