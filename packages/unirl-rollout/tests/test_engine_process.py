"""An engine's process leaves nothing behind."""

import os
import signal
import sys
from multiprocessing.shared_memory import SharedMemory
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from memory_server import CODEC

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.child.process import EngineProcess


@pytest.mark.parametrize("is_rank_dead", [False, True])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_an_engine_shares_with_its_own_processes_is_freed_with_it(tmp_path, end, is_rank_dead):
    folder = tmp_path / "files"
    folder.mkdir()
    tests = str(Path(__file__).parent)
    common = SharedMemory(create=True, size=64)
    variables = {"PYTHONPATH": tests, "COMMON": common.name}
    process = EngineProcess(CODEC, sys.executable, variables, folder, module="memory_server", log=tmp_path / "log")
    shared: Any = process.call(Start("", {}, 0, str(folder)), 300)
    left = [Path("/dev/shm") / shared.name, Path(f"/dev/shm/sem.{shared.semaphore.lstrip('/')}")]
    assert all(file.exists() for file in left)
    if is_rank_dead:
        os.kill(shared.rank, signal.SIGKILL)
    methodcaller(end)(process)
    assert not any(file.exists() for file in left) and folder.exists() == (end == "kill")
    common.unlink()  # raises where it is gone
    common.close()
