"""Devices that train are lent to engines where that saves more time than it takes."""

from typing import Any

import pytest

from unirl.trainer.clock import PhaseClock
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.learner import Learner
from unirl.trainer.loops.hybrid import Handover, Lending
from unirl.types.errors import ContractError


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakePool:
    """Members that take `switch_s` seconds to begin, and as long to end."""

    name = "rollout"

    def __init__(self, events: list[Any], clock: Clock, lent: int = 3, others: int = 1) -> None:
        self.events, self.clock, self.num_lent, self.num_others, self.switch_s = events, clock, lent, others, 1.0

    def lend(self, *, wakes: bool) -> None:
        self.events.append(("lend", wakes))
        self.clock.now_s += self.switch_s

    def take_back(self, *, cuts_calls: bool, sleeps: bool) -> None:
        self.events.append(("take back", cuts_calls, sleeps))
        self.clock.now_s += self.switch_s


@pytest.fixture
def made() -> Any:
    events: list[Any] = []
    clock = Clock()
    pool = FakePool(events, clock)
    handover = Handover(True, True, leave=lambda: events.append("leave"), come=lambda: events.append("come"))
    return Lending([pool], handover, clock), pool, clock, events


def rollout(lending: Lending, clock: Clock, waits_s: float, *, is_due: bool = True) -> bool:
    """True if the push has to reach members that have just begun."""
    has_begun = lending.begin(is_due=is_due)
    lending.waits()
    clock.now_s += waits_s
    lending.end()
    return has_begun


def test_memory_is_handed_over_in_order(made: Any) -> None:
    lending, _, clock, events = made
    assert not rollout(lending, clock, 8.0), "they work to begin with"
    assert events == [("take back", True, True), "come"]
    events.clear()
    assert rollout(lending, clock, 8.0)
    assert events == ["leave", ("lend", True), ("take back", True, True), "come"]
    assert lending.metrics()["schedule/hybrid/switch_s"] == 2.0


def test_what_saves_less_than_it_takes_is_not_lent_until_it_may_have_changed(made: Any) -> None:
    lending, pool, clock, _ = made
    pool.switch_s = 2.0
    rollout(lending, clock, 2.0)  # the work of 4 members for 2 s: one alone takes 8 s, so lending saves 6 s
    assert lending.saved_s == pytest.approx(6.0) and lending.pays_off
    pool.switch_s = 10.0
    rollout(lending, clock, 2.0)
    assert not lending.pays_off, "11 s expected: the mean of 2 s to take back at first, and 20 s"
    lent = []
    for _ in range(8):
        rollout(lending, clock, 8.0)
        lent.append(lending.metrics()["schedule/hybrid/lent"])
    assert lent[:5] == [0.0] * 5 and 1.0 in lent, "what is not measured is believed less and less"


def test_nothing_is_lent_where_training_does_not_wait(made: Any) -> None:
    lending, _, clock, events = made
    rollout(lending, clock, 8.0)
    events.clear()
    assert not rollout(lending, clock, 0.0, is_due=False) and not events
    for _ in range(20):
        rollout(lending, clock, 0.0)
    assert lending.saved_s < 0.01


def test_members_that_join_while_devices_train_rest_with_the_others(made: Any) -> None:
    lending, pool, clock, events = made
    rollout(lending, clock, 8.0)
    events.clear()
    pool.num_lent = 4
    lending.begin(is_due=False)
    assert events == [("take back", True, True), "come"]
    events.clear()
    lending.begin(is_due=False)
    assert not events


def test_a_run_without_members_to_lend_is_refused() -> None:
    with pytest.raises(ContractError, match="nothing to lend"):
        Lending([], Handover(cuts_calls=False, sleeps=False))


class Pushes:
    """A runtime and its sync: notes what is pushed, of which the first time each version changes the engine."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.version = 0

    def role(self, name: str, seen_as: Any) -> None:
        assert name == "stack"

    def push(self, policy: None) -> dict[str, float]:
        is_new = self.version not in self.pushed
        self.pushed.append(self.version)
        return {"sync/changed_tensors": float(is_new)}


def test_members_that_begin_are_pushed_to_again_which_is_no_sign_of_weights_that_do_not_train() -> None:
    sync: Any = Pushes()
    guardrails = Guardrails(GuardrailConfig(), scorers=[])
    learner = Learner(sync, guardrails=guardrails, clock=PhaseClock(), sync=sync)
    for done in range(4):
        sync.version = done
        learner.push(done, None)
        learner.push(done, None)
        learner.forget_push()
        pushed = learner.push(done, None)
        assert pushed == {"sync/changed_tensors": 0.0}
        measured = dict.fromkeys(("train/grad_norm", "train/loss", "reward/mean", "reward/std", "reward/max"), 1.0)
        measured |= {"group/trained_samples": 8.0, "reward/min": 0.0}
        assert not learner.watch({**measured, **pushed}, done).alarms
    assert sync.pushed == [0, 0, 1, 1, 2, 2, 3, 3]
