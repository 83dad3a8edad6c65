"""The plan of who is on the device, and its order: out first, then in."""

from typing import Any

import pytest

from unirl.config.schema import Residency
from unirl.trainer.clock import PhaseClock
from unirl.trainer.residency import DeviceResidents, residency_plan

ALL = Residency(sleep_engine=True, offload_weights=True, offload_optimizer=True, offload_reward=True)


class Moves:
    """Stands for a runtime: every role writes down what is asked of it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def role(self, name: str, protocol: type | None = None) -> Any:
        return _Role(name, self.seen)


class _Role:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __getattr__(self, method):
        return lambda *parts: self.seen.append(" ".join([self.name, method, *(part for [part] in parts)]))


def moves(residency: Residency, phases: str, **options) -> list[list[str]]:
    """What moves before each of some phases."""
    runtime: Any = Moves()
    residents = DeviceResidents(residency_plan(residency, **{"has_own_weights": True, **options}), runtime)
    found = []
    for phase in phases.split():
        before = len(runtime.seen)
        residents.enter(phase)
        found.append(runtime.seen[before:])
    return found


def test_a_step_moves_out_before_it_moves_in_and_only_what_changes():
    assert moves(ALL, "other sync rollout reward other train sync rollout") == [
        [],
        ["backend offload optimizer", "reward offload"],
        ["backend offload weights"],
        ["reward onload"],
        [],
        ["engine sleep", "reward offload", "backend onload weights", "backend onload optimizer"],
        ["backend offload optimizer", "engine wake_up"],
        ["backend offload weights"],
    ]


def test_an_evaluation_finds_engine_and_rewards_and_a_checkpoint_what_trains():
    assert moves(ALL, "train sync eval checkpoint rollout")[2:] == [
        ["backend offload weights", "reward onload"],
        ["backend onload weights", "backend onload optimizer"],
        ["backend offload weights", "backend offload optimizer", "reward offload"],
    ]


def test_weights_that_are_sampled_with_stay_and_gradients_of_a_reward_keep_it():
    assert moves(ALL, "rollout train", has_own_weights=False)[0] == ["backend offload optimizer", "reward offload"]
    assert "reward onload" in moves(ALL, "rollout train", trains_through_reward=True)[1]
    assert "reward offload" not in moves(ALL, "rollout", is_scored_meanwhile=True)[0]


def test_what_a_recipe_does_not_name_never_moves():
    assert residency_plan(Residency(), has_own_weights=True) == {}
    assert moves(Residency(sleep_engine=True), "sync rollout reward train checkpoint sync") == [
        *([[]] * 3),
        ["engine sleep"],
        [],
        ["engine wake_up"],
    ]


def test_the_clock_enters_the_plan_before_each_phase_and_counts_its_seconds_apart():
    clock, seen = PhaseClock(), []
    with clock.phase("train"):
        pass
    assert "residency" not in clock.wall_s
    clock.before = seen.append
    with clock.phase("sync"):
        seen.append("inside")
    assert seen == ["sync", "inside"]
    assert set(clock.step_metrics()) == {"timing_s/train", "timing_s/residency", "timing_s/sync"}


def test_a_move_that_fails_ends_the_phase_before_it_begins():
    clock = PhaseClock()

    def fails(phase):
        raise RuntimeError(f"no room for {phase}")

    clock.before = fails
    with pytest.raises(RuntimeError, match="no room for rollout"), clock.phase("rollout"):
        raise AssertionError("the phase has begun")
