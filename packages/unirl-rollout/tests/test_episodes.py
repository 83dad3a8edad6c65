"""Episodes: environments of gymnasium one by one and batched, and what the engine makes of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from walk_fakes import LENGTH, Steady

from unirl.rollout.engine.episodes.engine import EpisodesEngine, start_seeds
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.rollout.environments.vector import EnvironmentFault, Played, Seen, Spaces, VectorEnvironment
from unirl.types.actions import ActionSegment
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts, Videos
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams, ARSamplingParams
from unirl.types.segments import SegmentStatus

KINDS = ["fakes/Walk-v0", "fakes/WalkBatched-v0"]
PARAMS = ActionSamplingParams()


def request(*seeds: int | None, rollout_id: int = 0, **changes: Any) -> RolloutReq:
    fields: dict[str, Any] = {
        "sample_ids": [f"s{row}" for row in range(len(seeds))],
        "group_ids": [f"g{row // 2}" for row in range(len(seeds))],
        "primitives": {"text": Texts(texts=["go"] * len(seeds))},
        "metadata": [None if seed is None else {"seed": seed} for seed in seeds],
        "sampling_params": PARAMS,
        "rollout_id": rollout_id,
    }
    return RolloutReq(**(fields | changes))


def environment(env_id: str, **options: Any) -> Any:  # Any: a test knows which optional parts there are
    return GymnasiumEnvironment(env_id, **options)


def played(env_id: str, *seeds: int, chunk: int = 2, **options: Any) -> Any:
    engine = EpisodesEngine(
        Steady(chunk), environment=GymnasiumEnvironment(env_id, **options), forward_batch_size=len(seeds)
    )
    track = engine.generate(request(*seeds)).track("action")
    engine.shutdown()
    assert isinstance(track.segment, ActionSegment)
    return track, track.segment


# Environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", KINDS)
def test_an_episode_ends_within_a_chunk_and_rests_while_others_go_on(env_id):
    env = environment(env_id)
    assert env.start([0, 3]).states.tolist() == [[0, 0, 0], [3, 0, 0]]
    moves = np.zeros((2, 3, 1), np.float32)  # 0 is the middle of [-1, 3]
    first = env.play([0, 1], moves)
    assert first.seen.states.tolist() == [[0, 3, 3], [3, 3, 3]]
    assert (first.num_moves.tolist(), first.rewards.tolist()) == ([3, 3], [3, 3])
    second = env.play([0, 1], moves)
    assert second.seen.states.tolist() == [[0, LENGTH, LENGTH], [3, 6, 6]]
    assert (second.num_moves.tolist(), second.terminated.tolist()) == ([2, 3], [True, False])
    assert second.successes.tolist() == [1, 0]
    third = env.play([1], moves[:1])
    assert third.seen.states.tolist() == [[3, 8, 8]] and third.terminated.tolist() == [True]
    env.close()
    env.close()


@pytest.mark.parametrize("env_id", KINDS)
def test_the_same_seed_gives_the_same_start_also_with_other_numbers_of_episodes(env_id):
    env = environment(env_id)
    assert env.start([4, 2, 4]).states[:, 0].tolist() == [4, 2, 4]
    assert env.start([2]).states.tolist() == [[2, 0, 0]]


@pytest.mark.parametrize("env_id", KINDS)
def test_limits_cut_episodes_off(env_id):
    env = environment(env_id, max_moves=4)
    env.start([0, 3])
    cut = env.play([0, 1], np.zeros((2, 6, 1), np.float32))
    assert (cut.num_moves.tolist(), cut.truncated.tolist(), cut.terminated.tolist()) == (
        [4, 4],
        [True] * 2,
        [False] * 2,
    )
    limited = environment("fakes/WalkLimited-v0")
    limited.start([0])
    assert limited.play([0], np.zeros((1, 6, 1), np.float32)).truncated.tolist() == [True]


def test_observations_and_actions_are_taken_apart_by_their_spaces():
    env = environment("fakes/Mixed-v0")
    assert env.spaces == Spaces(action_size=1, image_shape=(3, 16, 20), state_size=5, moves_per_second=10)
    seen = env.start([0])
    assert seen.images[0, :, 2, 5].tolist() == [1, 2, 3]
    np.testing.assert_allclose(seen.states[0], [0.5, 0, 0.1, 0.2, 0.3], atol=1e-6)  # gymnasium sorts the names
    env.play([0], np.array([[[-1.0], [-0.34], [-0.3], [0.3], [0.34], [1.0]]], np.float32))
    assert env._envs[0].unwrapped.actions == [1, 1, 2, 2, 3, 3]


def test_moves_are_stretched_to_the_bounds_and_cut_at_them():
    env = environment("fakes/Walk-v0")
    env.start([0])
    assert env.play([0], np.array([[[-1.0], [1.0], [-7.0], [0.5]]], np.float32)).rewards.tolist() == [-1 + 3 - 1 + 2]


@pytest.mark.parametrize("env_id", KINDS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "the observation holds numbers that are not finite"),
        ("shape", r"the observation has the shape \[1, 2\]"),
        ("reward", "a reward of inf is not finite|a reward is not finite"),
    ],
)
def test_what_is_no_observation_or_reward_is_named(env_id, fault, words):
    if env_id != KINDS[0] and fault == "shape":
        words = r"the observation has the shape \[1, 2\], its space says \[1, 3\]"
    env = environment(env_id, options={"fault": fault})
    env.start([0])
    (error,) = env.play([0], np.zeros((1, 4, 1), np.float32)).errors
    assert re.match(f"{env_id}: (EnvironmentFault: {env_id}: |EnvironmentFault: |)({words})", error)


FAULTS = {
    "raises": r"fakes/Walk-v0: ValueError: the arm is stuck \(walk_fakes.py:\d+\)",
    "nan": r"fakes/Walk-v0: EnvironmentFault: .* holds numbers that are not finite",
    "reward": r"fakes/Walk-v0: EnvironmentFault: a reward of inf is not finite",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_episode_whose_environment_fails_in_this_process_is_lost_alone(fault):
    track, segment = played("fakes/Walk-v0", 0, 1, 2, shows=True, options={"fault": fault, "only": 1})
    whole, _ = played("fakes/Walk-v0", 0, 2, shows=True)
    assert segment.status.tolist() == [SegmentStatus.COMPLETED, SegmentStatus.FAILED, SegmentStatus.COMPLETED]
    assert segment.lengths.tolist() == [3, 2, 4]
    said = track.metadata[1]["episode"]
    assert said["end"] == "failed" and re.match(FAULTS[fault], said["reason"])
    others = track.select([0, 2])
    assert others.segment.equals(whole.segment) and others.decoded.equals(whole.decoded)
    assert track.decoded.unpack("frames")[1][:, 0, 0, 0].tolist() == [0, 2, 2], "what it showed last"


@pytest.mark.parametrize("env_id", KINDS)
def test_an_episode_that_does_not_start_is_lost_alone(env_id):
    env = environment(env_id, options={"fault": "no start", "only": 3})
    is_batched = env_id != KINDS[0]
    for _ in range(2):
        assert env.start([0, 3]).states.tolist() == [[0, 0, 0], [0, 0, 0]]
        errors = env.play([0, 1], np.zeros((2, 3, 1), np.float32)).errors
        assert [error is not None for error in errors] == [is_batched, True], "a batched class starts all or none"
        assert re.match(rf"{env_id}: ValueError: no table \(walk_fakes.py:\d+\)", errors[1])
    assert env.start([1, 2]).states.tolist() == [[1, 0, 0], [2, 0, 0]]
    assert env.play([0, 1], np.zeros((2, 3, 1), np.float32)).errors == [None, None]


def test_what_a_batched_class_raises_loses_what_it_plays_and_the_next_episodes_are_whole():
    env = environment("fakes/WalkBatched-v0", options={"fault": "raises", "only": 0})
    env.start([0, 3])
    env.play([0, 1], np.zeros((2, 2, 1), np.float32))
    lost = env.play([0, 1], np.zeros((2, 2, 1), np.float32))
    assert all("ValueError: the arm is stuck" in error for error in lost.errors)
    assert lost.seen.states.tolist() == [[0, 2, 2], [3, 2, 2]], "what they showed last"
    assert env.start([1, 2]).states.tolist() == [[1, 0, 0], [2, 0, 0]]
    assert env.play([0, 1], np.zeros((2, 4, 1), np.float32)).errors == [None, None]


def test_where_no_episode_begins_there_is_no_size_of_frames():
    env = environment("fakes/Walk-v0", shows=True, options={"fault": "no start"})
    with pytest.raises(EnvironmentFault, match=r"no episode has begun: fakes/Walk-v0: ValueError: no table"):
        env.start([0, 1])


def test_numbers_are_stretched_to_the_bounds_of_an_environment_of_gymnasium():
    env = environment("Pendulum-v1", max_moves=5)
    assert env.spaces == Spaces(action_size=1, state_size=3, moves_per_second=30)
    env.start([0, 1])
    played = env.play([0, 1], np.full((2, 6, 1), 0.5, np.float32))
    assert played.num_moves.tolist() == [5, 5] and played.truncated.all()
    assert env._envs[0].unwrapped.last_u == 1.0  # half of the torque from -2 to 2


def test_unknown_ids_and_spaces_are_refused():
    with pytest.raises(ConfigError, match=r"engine.environment.id = Nowhere-v0: .*Give a registered id"):
        GymnasiumEnvironment("Nowhere-v0")
    with pytest.raises(ConfigError, match="no_such_module"):
        GymnasiumEnvironment("no_such_module:Nowhere-v0")
    with pytest.raises(ConfigError, match=r"Taxi-v4: observations are Discrete\(500\)"):
        GymnasiumEnvironment("Taxi-v4")


def test_frames_are_drawn_for_people_where_asked():
    track, _ = played("fakes/Walk-v0", 0, shows=True)
    assert isinstance(track.decoded, Videos)
    assert track.decoded.fps == 10  # 20 moves per second, chunks of two
    assert track.decoded.frames.shape == (4, 3, 16, 16)
    assert track.decoded.frames[:, 0, 0, 0].tolist() == [0, 2, 4, 5]


# The engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", KINDS)
def test_each_episode_has_its_decisions_in_order(env_id):
    track, segment = played(env_id, 0, 2, 1)
    assert segment.lengths.tolist() == [3, 4, 3]
    assert segment.states[:, 0].tolist() == [0] * 3 + [2] * 4 + [1] * 3
    assert segment.states[:, 1].tolist() == [0, 2, 4, 0, 2, 4, 6, 0, 2, 4]
    assert segment.num_moves.tolist() == [2, 2, 1, 2, 2, 2, 1, 2, 2, 2]
    assert segment.final_states[:, 1].tolist() == [5, 7, 6]
    assert segment.status.tolist() == [SegmentStatus.COMPLETED] * 3
    assert segment.log_probs[2].tolist() == [0, 0] and segment.log_probs[3].tolist() == [0, -1]
    # (seed / 4 - .5) stretched from [-1, 1] to [-1, 3]: 2 m + 1
    returns = [length * (2 * (seed / 4 - 0.5) + 1) for seed, length in ((0, 5), (2, 7), (1, 6))]
    said = [row["episode"] for row in track.metadata]
    assert [each["reward"] for each in said] == pytest.approx(returns)
    assert said[1] == {"reward": 7.0, "moves": 7, "decisions": 4, "end": "completed", "success": 1.0}
    assert track.metadata[1]["seed"] == 2
    assert track.counts["moves"].tolist() == [5, 7, 6]


@pytest.mark.parametrize("env_id", KINDS)
def test_an_episode_that_is_cut_off_says_so(env_id):
    track, segment = played(env_id, 0, 1, options={"ends": "truncated"})
    assert segment.status.tolist() == [SegmentStatus.TRUNCATED] * 2
    assert track.metadata[0]["episode"]["end"] == "truncated"


def test_how_many_are_played_at_once_changes_nothing():
    def of(size: int):
        engine = EpisodesEngine(Steady(), environment=GymnasiumEnvironment("fakes/Walk-v0"), forward_batch_size=size)
        track = engine.generate(request(0, 3, 1, 2, 2)).track("action")
        return track.replace(counts={name: track.counts[name] for name in ("decisions", "moves")})

    assert of(5).equals(of(2))


class Ranks:
    """Another rank, whose longest episode has `longest` decisions."""

    policy_version = 0

    def __init__(self, longest: int) -> None:
        self.longest, self.asked = longest, 0

    def any_rank(self, value: bool) -> bool:
        self.asked += 1
        return value or self.asked <= self.longest


def test_ranks_draw_equally_often_until_the_last_episode_has_ended():
    """They gather the shards of one model; what a rank without episodes draws is dropped."""
    ranks: Any = Ranks(longest=5)
    pipeline = Steady()
    engine = EpisodesEngine(pipeline, ranks, environment=environment("fakes/Walk-v0"), forward_batch_size=2)
    track = engine.generate(request(0, 1)).track("action")
    assert track.batch_size == 2 and track.counts["decisions"].tolist() == [3, 3]
    assert ranks.asked == 6 and pipeline.num_draws == 5


def test_draws_are_named_after_rollout_sample_and_decision():
    pipeline = Steady(chunk=3)
    engine = EpisodesEngine(pipeline, environment=GymnasiumEnvironment("fakes/Walk-v0"), forward_batch_size=2)
    engine.generate(request(0, 1, rollout_id=7))
    assert pipeline.keys == ["r7:s0::0", "r7:s1::0", "r7:s0::1", "r7:s1::1"]


def test_the_episodes_of_a_group_start_alike():
    assert start_seeds(request(5, 5, 6, 6), PARAMS) == [5, 5, 6, 6]
    seeds = start_seeds(request(None, None, None, None), PARAMS)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    with pytest.raises(ConfigError, match=r"s1: metadata.seed = -1 must be a whole number"):
        start_seeds(request(0, -1), PARAMS)


class Losing(VectorEnvironment):
    """Loses its second episode at the second decision."""

    spaces = Spaces(action_size=1, state_size=3)

    def start(self, seeds):
        self.made = 0
        return Seen(states=np.zeros((len(seeds), 3), np.float32))

    def play(self, rows, moves):
        self.made += 1
        lost = [row == 1 and self.made == 2 for row in rows]
        return Played(
            seen=Seen(states=np.full((len(rows), 3), self.made, np.float32)),
            rewards=np.ones(len(rows)),
            num_moves=np.full(len(rows), 2),
            terminated=np.full(len(rows), self.made == 3),
            truncated=np.zeros(len(rows), np.bool_),
            successes=np.full(len(rows), np.nan),
            errors=["the process died" if each else None for each in lost],
        )

    def close(self):
        pass


def test_a_lost_episode_says_why_and_the_others_go_on():
    engine = EpisodesEngine(Steady(), environment=Losing(), forward_batch_size=2)
    track: Any = engine.generate(request(0, 1)).track("action")
    assert track.segment.lengths.tolist() == [3, 2]
    assert track.segment.status.tolist() == [SegmentStatus.COMPLETED, SegmentStatus.FAILED]
    assert track.metadata[1]["episode"]["reason"] == "the process died"
    assert "success" not in track.metadata[0]["episode"]
    assert track.decoded is None


def test_a_policy_of_another_environment_is_refused():
    with pytest.raises(ConfigError, match="the policy has action_size = 2, its environment 1"):
        EpisodesEngine(Steady(action_size=2), environment=GymnasiumEnvironment("fakes/Walk-v0"), forward_batch_size=1)
    with pytest.raises(ConfigError, match=r"image_shape = None, its environment \(3, 16, 20\)"):
        EpisodesEngine(Steady(), environment=GymnasiumEnvironment("fakes/Mixed-v0"), forward_batch_size=1)
    engine = EpisodesEngine(Steady(), environment=GymnasiumEnvironment("fakes/Walk-v0"), forward_batch_size=1)
    with pytest.raises(ContractError, match="needs ActionSamplingParams"):
        engine.generate(request(0, sampling_params=ARSamplingParams(temperature=1.0)))
