"""Environments of gymnasium in processes: as in one process, and what dies, hangs or raises loses no other episode."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from walk_fakes import Steady

from unirl.rollout.engine.episodes.engine import EpisodesEngine
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.rollout.environments.gymnasium_processes import GymnasiumProcesses
from unirl.rollout.environments.vector import EnvironmentFault
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams

WALK = "walk_fakes:fakes/Walk-v0"
STILL = np.zeros((3, 2, 1), np.float32)


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


@pytest.fixture
def opened() -> Iterator[Any]:
    made: list[GymnasiumProcesses] = []

    def make(**options: Any) -> Any:  # Any: optional parts are there
        made.append(GymnasiumProcesses(WALK, num_processes=2, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_processes_play_as_one_does(opened):
    def played(environment) -> Any:
        req = RolloutReq(
            sample_ids=["a", "b", "c"],
            primitives={"text": Texts(texts=["go"] * 3)},
            metadata=[{"seed": seed} for seed in (0, 3, 1)],
            sampling_params=ActionSamplingParams(),
        )
        engine = EpisodesEngine(Steady(), environment=environment, forward_batch_size=3)
        tracks = [engine.generate(req).track("action") for _ in range(2)]
        return [track.replace(counts={"moves": track.counts["moves"]}) for track in tracks]

    first, again = played(opened(shows=True))
    alone, _ = played(GymnasiumEnvironment(WALK, shows=True))
    assert first.equals(alone) and again.equals(alone)


def test_a_killed_process_is_replaced_and_its_episodes_go_on(opened):
    env = opened()
    env.start([0, 1, 2])
    env.play([0, 1, 2], STILL)
    os.kill(env.pids[0], signal.SIGKILL)
    played = env.play([0, 1, 2], STILL)
    assert played.errors == [None] * 3 and env.num_restarts == 1
    assert played.seen.states.tolist() == [[0, 4, 4], [1, 4, 4], [2, 4, 4]]


def test_what_cannot_be_played_again_is_lost_alone(opened):
    env = opened(deterministic=False)
    env.start([0, 1, 2])
    env.play([0, 1, 2], STILL)
    os.kill(env.pids[0], signal.SIGKILL)
    played = env.play([0, 1, 2], STILL)
    lost = [error is not None for error in played.errors]
    assert 0 < sum(lost) < 3
    assert all("its process is gone" in error for error in played.errors if error)
    assert not (played.terminated | played.truncated).any()
    assert played.seen.states[lost, 1].tolist() == [2] * sum(lost), "what it showed last"
    assert env.start([5]).states.tolist() == [[5, 0, 0]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "ValueError: the arm is stuck"),
        ("nan", "the observation holds numbers that are not finite"),
        ("hangs", "gave no answer within 3 s, twice"),
        ("dies", "ended with status 3, twice"),
    ],
)
def test_an_episode_whose_environment_fails_says_how(opened, fault, words):
    env = opened(options={"fault": fault, "only": 1}, step_timeout_s=3.0)
    env.start([0, 1, 2])
    moves = np.zeros((3, 4, 1), np.float32)
    played = env.play([0, 1, 2], moves)
    assert words in str(played.errors[1])
    assert [played.errors[0], played.errors[2]] == [None, None]
    assert played.num_moves.tolist() == [4, 1, 4]


def test_an_episode_that_does_not_start_is_lost_alone(opened):
    env = opened(options={"fault": "no start", "only": 1}, shows=True)
    seen = env.start([0, 1, 2])
    assert seen.states.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 0]] and not seen.frames[1].any()
    played = env.play([0, 1, 2], STILL)
    assert "ValueError: no table" in str(played.errors[1])
    assert [played.errors[0], played.errors[2]] == [None, None]


def test_where_no_episode_begins_there_is_no_size_of_frames(opened):
    env = opened(options={"fault": "no start"}, shows=True)
    with pytest.raises(EnvironmentFault, match="no episode has begun: .*ValueError: no table"):
        env.start([0, 1, 2])
