"""Environments in a pool: what `EnvironmentWorkers` promise, whoever shares the processes and whichever member dies."""

import itertools
import os
import re
import signal
import threading

import pytest
from played_environments import Counting, Fickle, Forgetful, Saved

from unirl.rollout.environments import pool_member, wire
from unirl.rollout.environments.begun import Lost
from unirl.rollout.environments.pool_member import PoolMember
from unirl.rollout.environments.pooled import PooledEnvironments
from unirl.types.errors import ConfigError, WorkerError


class Stand:
    """A member in this process. `dies` lets all its calls fail as those of a dead one."""

    def __init__(self, key, num_processes):
        self.key = self.name = key
        self.hosted = PoolMember(num_processes)
        self.dies = False

    def start(self, method, *args):
        if self.dies:
            return self._fail
        result = getattr(self.hosted, method)(*args).result
        return lambda: self._fail() if self.dies else result()

    def _fail(self):
        raise WorkerError(self.name, "it died")


class Stands:
    """A pool of them. Implements HostingPool."""

    name = "env"

    def __init__(self, *sizes):
        self.keys, self.reported, self.made = itertools.count(), [], []
        self.all = [self.make(size) for size in sizes]

    def make(self, size):
        self.made.append(Stand(f"member-{next(self.keys)}", size))
        return self.made[-1]

    def members(self):
        return list(self.all)

    def lost(self, member, why):
        self.reported.append(why)
        self.all = [self.make(1) if own.key == member.key else own for own in self.all]

    def close(self):
        for each in self.made:
            each.hosted.close().result()


@pytest.fixture
def pool(request):
    made = Stands(*getattr(request, "param", (1, 1)))
    yield made
    made.close()


def client(pool, environment, *, at="turns", step_timeout_s=20.0, memory_gb=None):
    return PooledEnvironments(environment, pool, at=at, step_timeout_s=step_timeout_s, memory_gb=memory_gb)


def begun(workers, num):
    return workers.reset({f"e{n}": ({}, 10 * n) for n in range(num)})


def observed(found):
    return {name: step.observation for name, step in found.items()}


def test_clients_share_all_processes_and_not_their_episodes(pool):
    one, other = client(pool, Counting()), client(pool, Counting())
    assert begun(one, 3) == {"e0": 0, "e1": 10, "e2": 20}
    assert begun(other, 3) == {"e0": 0, "e1": 10, "e2": 20}
    states = [member.hosted.prepare("turns", None).result() for member in pool.all]
    assert [state.num_episodes for own in states for state in own] == [3, 3], "each begins where there is most room"
    assert observed(one.step({"e2": "abc", "e0": "a"})) == {"e2": 23, "e0": 1}
    assert observed(other.step({"e2": "d"})) == {"e2": 21}
    one.end(["e0", "e1", "e2"])
    assert observed(other.step({"e2": "d", "e1": ""})) == {"e2": 22, "e1": 10}
    assert one.reset({"e0": ({}, 5)}) == {"e0": 5}


def test_a_process_serves_whoever_has_something_to_do(pool):
    """While one client's engine thinks, the other has both processes."""
    clients = [client(pool, Counting()) for _ in range(2)]
    for each in clients:
        begun(each, 2)
    found = []

    def play(own):
        found.extend(own.step({"e0": "x" * n, "e1": "y"})["e0"].observation for n in range(1, 30))

    threads = [threading.Thread(target=play, args=(own,)) for own in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([n * (n + 1) // 2 for n in range(1, 30)] * 2)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", r"RuntimeError: no such move \(played_environments.py:\d+\)"),
        ("memory", "MemoryError"),
        ("die", "ended with status 7, twice"),
        ("hang", "no answer within 2 s, twice"),
    ],
)
@pytest.mark.parametrize("pool", [(1,)], indirect=True)
def test_what_goes_wrong_costs_its_own_episode(pool, action, reason):
    workers, other = client(pool, Counting(), step_timeout_s=2.0, memory_gb=4), client(pool, Counting())
    begun(workers, 3)
    begun(other, 1)
    workers.step({"e0": "a", "e1": "bb", "e2": "ccc"})
    found = workers.step({"e0": "dddd", "e1": action, "e2": "e"})
    assert isinstance(found["e1"], Lost) and re.search(reason, found["e1"].reason)
    assert found["e0"].observation == 5 and found["e2"].observation == 24
    assert isinstance(workers.step({"e1": "a"})["e1"], Lost), "what is lost stays lost"
    assert observed(other.step({"e0": "abc"})) == {"e0": 3}, "restored after the death that another client caused"


def test_processes_that_are_killed_between_calls_change_nothing(pool, tmp_path):
    workers = client(pool, Counting(str(tmp_path)))
    begun(workers, 4)
    expected = {f"e{n}": 10 * n for n in range(4)}
    for turn in range(6):
        states = [member.hosted.prepare("turns", None).result() for member in pool.all]
        os.kill(states[turn % 2][0].pid, signal.SIGKILL)
        expected = {name: total + 1 for name, total in expected.items()}
        assert observed(workers.step(dict.fromkeys(expected, "x"))) == expected
    assert workers.num_restarts == 6
    assert observed(workers.step({"e0": "die once", "e1": "z"})) == {"e0": 14, "e1": 17}


def test_a_member_that_dies_is_reported_and_its_episodes_continue_elsewhere(pool):
    workers = client(pool, Counting())
    begun(workers, 4)
    workers.step(dict.fromkeys(["e0", "e1", "e2", "e3"], "ab"))
    pool.all[0].dies = True
    assert observed(workers.step(dict.fromkeys(["e0", "e1", "e2", "e3"], "c"))) == {
        "e0": 3,
        "e1": 13,
        "e2": 23,
        "e3": 33,
    }
    assert len(pool.reported) == 1 and "it died" in pool.reported[0]
    workers.end(["e0", "e1", "e2", "e3"])
    begun(workers, 4)
    assert pool.all[0].hosted.prepare("turns", None).result()[0].num_episodes == 2, "the new member plays too"


def test_a_member_that_leaves_while_it_plays_loses_no_episode(pool):
    workers = client(pool, Counting())
    begun(workers, 4)
    pool.all[0].hosted.close().result()
    assert observed(workers.step({"e0": "a", "e1": "a", "e2": "a"})) == {"e0": 1, "e1": 11, "e2": 21}
    assert "it has left the pool" in pool.reported[0]


def test_episodes_of_a_client_that_says_nothing_are_forgotten_and_come_back_if_it_does(pool, monkeypatch):
    silent, other = client(pool, Counting()), client(pool, Counting())
    begun(silent, 4)
    silent.step({"e1": "abc"})
    begun(other, 2)
    monkeypatch.setattr(pool_member, "FORGET_S", -1.0)
    other.end(["e0", "e1"])
    pool.all[0].hosted.prepare("turns", None).result(), pool.all[1].hosted.prepare("turns", None).result()
    monkeypatch.setattr(pool_member, "FORGET_S", 3600.0)
    for member in pool.all:
        member.hosted.play([pool_member.Batch("third", 0, 0, wire.packed([]), 0, 1.0)]).result()
    assert [member.hosted.prepare("turns", None).result()[0].num_episodes for member in pool.all] == [0, 0]
    assert observed(silent.step({"e1": "d", "e2": ""})) == {"e1": 14, "e2": 20}


def test_all_members_may_die_but_not_again_and_again(pool):
    workers = client(pool, Counting())
    begun(workers, 2)
    for member in pool.all:
        member.dies = True
    assert observed(workers.step({"e0": "a", "e1": "a"})) == {"e0": 1, "e1": 11}
    make = pool.make
    pool.make = lambda size: (stand := make(size), setattr(stand, "dies", True))[0]
    for member in pool.all:
        member.dies = True
    with pytest.raises(WorkerError, match="it died"):
        workers.step({"e0": "a"})


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (Forgetful(), "neither deterministic nor resumable"),
        (Fickle(), "gives other answers the second time"),
        (Saved(), "observation=4"),
    ],
)
def test_what_can_be_repeated_or_restored_survives_its_process(pool, environment, found):
    workers = client(pool, environment)
    begun(workers, 1)
    workers.step({"e0": "aaa"})
    for pid in workers.pids:
        os.kill(pid, signal.SIGKILL)
    assert found in str(workers.step({"e0": "b"})["e0"])


def test_what_cannot_be_played_is_refused(pool, monkeypatch):
    begun(client(pool, Counting()), 1)
    with pytest.raises(ConfigError, match="engine.environment.pool: the pool plays turns, and only that"):
        begun(client(pool, Counting(), at="engine.environment"), 1)
    monkeypatch.setattr(Counting, "python", "/nowhere/python")
    with pytest.raises(ConfigError, match="Counting.python = /nowhere/python is no file on"):
        begun(client(Stands(1), Counting()), 1)
    monkeypatch.setattr(Counting, "__module__", "__main__")
    with pytest.raises(ConfigError, match="defined in the script that runs"):
        client(pool, Counting())
