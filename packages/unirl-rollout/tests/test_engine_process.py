"""An engine's process leaves nothing behind."""

import sys
from pathlib import Path
from typing import Any

from memory_server import CODEC

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.child.process import EngineProcess


def test_memory_that_an_engine_shares_with_its_own_processes_is_freed_with_it(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    tests = str(Path(__file__).parent)
    process = EngineProcess(
        CODEC, sys.executable, {"PYTHONPATH": tests}, folder, module="memory_server", log=tmp_path / "log"
    )
    shared: Any = process.call(Start("", {}, 0, str(folder)), 300)
    memory = Path("/dev/shm") / shared.name
    assert memory.exists()
    process.stop()
    assert not memory.exists() and not folder.exists()
