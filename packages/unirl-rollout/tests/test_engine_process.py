"""An engine's process leaves nothing behind."""

import os
import signal
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.shared_memory import SharedMemory
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from memory_server import CODEC

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.child.process import EngineProcess
from unirl.rollout.engine.child.server import Sender
from unirl.types.errors import WorkerError
from unirl.types.heartbeat import Activity


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


def test_a_process_that_is_stopped_is_named_while_its_answer_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("unirl.rollout.engine.child.process.BEAT_S", 0.2)
    monkeypatch.setattr("unirl.types.heartbeat.SILENT_S", 1.0)
    folder = tmp_path / "files"
    folder.mkdir()
    variables = {"PYTHONPATH": str(Path(__file__).parent), "COMMON": ""}
    process = EngineProcess(CODEC, sys.executable, variables, folder, module="memory_server", log=tmp_path / "log")
    asked = process.ask(Start("", {}, 0, str(folder)))
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"no answer to start within 3 s, so it was stopped.*It has given none yet"):
        process.answer(asked, "start", 3.0)
    assert f"start waits: {process.name} has given no sign of life for 1 s." in caplog.text


def test_a_process_says_what_it_is_doing_until_its_pipe_closes(monkeypatch):
    monkeypatch.setattr("unirl.rollout.engine.child.server.BEAT_S", 0.01)
    ours, theirs = Pipe()
    activity = Activity()
    beating = threading.Thread(target=Sender(theirs, CODEC).beat, args=(activity,))
    with activity.doing("SampleLatents"):
        beating.start()
        call, beat = CODEC.decode_call(ours.recv_bytes())
    assert (call, beat.doing) == (0, "SampleLatents") and "in beat" not in beat.stack
    ours.close()
    beating.join(60)
    assert not beating.is_alive()
