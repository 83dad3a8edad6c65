"""Environments in processes: episodes stay apart, and what raises, hangs or dies costs its own episode at most."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from played_environments import Counting, Fickle, Forgetful, Saved

from unirl.rollout.environments.base import Environment, Step
from unirl.rollout.environments.workers import EnvironmentWorkers, Lost
from unirl.types.errors import ConfigError

FOLDER = str(Path(__file__).parent)


@pytest.fixture
def workers(request):
    made = []

    def make(environment, **options):
        given: dict[str, Any] = {"num_workers": 1, "step_timeout_s": 20.0} | options
        made.append(EnvironmentWorkers(environment, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def begun(pool, num):
    return pool.reset({f"e{n}": ({}, 10 * n) for n in range(num)})


@pytest.mark.parametrize("num_workers", [1, 2])
def test_episodes_are_apart_whoever_plays_them(workers, num_workers):
    pool = workers(Counting(), num_workers=num_workers)
    assert begun(pool, 3) == {"e0": 0, "e1": 10, "e2": 20}
    first = pool.step({"e2": "abc", "e0": "a"})
    assert {name: step.observation for name, step in first.items()} == {"e2": 23, "e0": 1}
    assert pool.step({"e0": "end"})["e0"] == Step(4, 1.0, terminated=True, counts={"moves": 1.0})
    assert len(set(pool.pids)) == num_workers
    pool.end(["e0", "e1", "e2"])
    assert pool.reset({"e0": ({}, 5)}) == {"e0": 5}


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", r"RuntimeError: no such move \(played_environments.py:\d+\)"),
        ("nan", "the reward of a step is nan"),
        ("other", "step returned int; return a Step"),
        ("memory", "MemoryError"),
    ],
)
def test_an_episode_that_goes_wrong_is_lost_alone(workers, action, reason):
    pool = workers(Counting(), memory_gb=4)
    begun(pool, 2)
    found = pool.step({"e0": action, "e1": "ab"})
    assert isinstance(found["e0"], Lost)
    assert re.search(reason, found["e0"].reason)
    assert found["e1"].observation == 12
    assert pool.num_restarts == 0
    assert isinstance(pool.step({"e0": "a"})["e0"], Lost), "what is lost stays lost"


def test_an_episode_that_cannot_begin_is_lost_alone(workers):
    found = workers(Counting()).reset({"bad": ({"refuse": True}, 0), "good": ({}, 1)})
    assert found["good"] == 1 and "KeyError" in found["bad"].reason


def test_a_process_that_dies_once_is_replaced_and_no_episode_notices(workers, tmp_path):
    pool = workers(Counting(str(tmp_path)))
    begun(pool, 3)
    pool.step({"e0": "a", "e1": "bb", "e2": "ccc"})
    found = pool.step({"e0": "dddd", "e1": "die once", "e2": "e"})
    assert {name: step.observation for name, step in found.items()} == {"e0": 5, "e1": 20, "e2": 24}
    assert pool.num_restarts == 1


@pytest.mark.parametrize(
    ("action", "reason"), [("die", "ended with status 7, twice"), ("hang", "no answer within 3 s")]
)
def test_an_action_that_ends_every_process_loses_its_episode_alone(workers, action, reason):
    pool = workers(Counting(), step_timeout_s=3.0)
    begun(pool, 3)
    pool.step({"e0": "a", "e1": "bb", "e2": "ccc"})
    found = pool.step({"e0": "dddd", "e1": action, "e2": "e"})
    assert reason in found["e1"].reason
    assert found["e0"].observation == 5 and found["e2"].observation == 24
    assert pool.num_restarts == 2


def test_processes_that_are_killed_between_calls_are_replaced(workers):
    pool = workers(Counting(), num_workers=2)
    begun(pool, 4)
    expected = {f"e{n}": 10 * n for n in range(4)}
    for turn in range(20):
        os.kill(pool.pids[turn % 2], signal.SIGKILL)
        expected = {name: total + 1 for name, total in expected.items()}
        found = pool.step(dict.fromkeys(expected, "x"))
        assert {name: step.observation for name, step in found.items()} == expected
    assert pool.num_restarts == 20


def test_what_cannot_be_repeated_or_restored_is_lost_with_its_process(workers):
    pool = workers(Forgetful())
    begun(pool, 2)
    os.kill(pool.pids[0], signal.SIGKILL)
    found = pool.step({"e0": "a", "e1": "b"})
    assert all("neither deterministic nor resumable" in lost.reason for lost in found.values())
    assert pool.reset({"new": ({}, 3)}) == {"new": 3}


def test_what_is_saved_is_restored(workers):
    pool = workers(Saved())
    begun(pool, 2)
    pool.step({"e0": "aaa"})
    os.kill(pool.pids[0], signal.SIGKILL)
    assert pool.step({"e0": "b", "e1": "cc"})["e0"].observation == 4


def test_an_environment_that_is_wrongly_called_deterministic_is_noticed(workers):
    pool = workers(Fickle())
    begun(pool, 1)
    pool.step({"e0": "a"})
    os.kill(pool.pids[0], signal.SIGKILL)
    assert "gives other answers the second time" in pool.step({"e0": "b"})["e0"].reason


def test_an_environment_that_cannot_be_sent_is_refused():
    class Local(Environment):
        def reset(self, task, seed):
            """Never called."""

        def step(self, action):
            """Never called."""

    with pytest.raises(ConfigError, match="Local cannot be sent to the processes that play"):
        EnvironmentWorkers(Local(), num_workers=1, step_timeout_s=1.0)


def test_a_class_of_the_script_that_runs_is_refused(monkeypatch):
    monkeypatch.setattr(Counting, "__module__", "__main__")
    with pytest.raises(ConfigError, match="Counting is defined in the script that runs.*Move it into a module"):
        EnvironmentWorkers(Counting(), num_workers=1, step_timeout_s=1.0)


def test_no_process_outlives_its_owner():
    script = (
        "import time\nfrom played_environments import Counting\n"
        "from unirl.rollout.environments.workers import EnvironmentWorkers\n"
        "pool = EnvironmentWorkers(Counting(), num_workers=2, step_timeout_s=5.0)\n"
        "pool.reset({'e': ({}, 0)})\nprint(*pool.pids, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=FOLDER) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive their owner"
        time.sleep(0.05)
