"""The running range: silent in a steady run, loud before a collapse."""

from typing import Any

import pytest

from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.parity import parity_metrics
from unirl.types.errors import ConfigError


def watched(guard: Guardrails, grad_norm: float, reward: float, **others: float) -> str:
    """What the guardrails say of a rollout, "" for nothing."""
    metrics = {"train/grad_norm": grad_norm, "reward/mean": reward, "reward/min": 0.0, "reward/max": 2.0}
    alarms = guard.observe({**metrics, "group/trained_samples": 8.0, **others})
    return "; ".join(f"{alarm.name}: {alarm.reason}" for alarm in alarms)


def steady(guard, num=10):
    for i in range(num):
        assert watched(guard, 0.20 + 0.01 * (i % 3), 1.0 + 0.02 * (i % 2)) == ""


def test_the_gradient_norms_that_preceded_a_collapse_are_noticed():
    guard = Guardrails(GuardrailConfig(action="stop"))
    steady(guard)
    assert watched(guard, 0.47, 1.0) == ""
    assert "running median" in watched(guard, 0.89, 1.0)
    assert not guard.acts
    assert "12.4 times" in watched(guard, 2.6, 1.0)
    assert guard.acts


def test_a_fall_of_the_reward_is_noticed():
    guard = Guardrails(GuardrailConfig(action="warn"))
    steady(guard)
    assert "fell" in watched(guard, 0.2, 0.2)
    watched(guard, 0.2, 0.2)
    assert not guard.acts


def test_a_non_finite_norm_alarms_at_once_and_values_that_alarm_do_not_move_the_range():
    guard = Guardrails(GuardrailConfig())
    assert "not finite" in watched(guard, float("nan"), 1.0)
    steady(guard)
    for _ in range(5):
        assert watched(guard, 9.0, 1.0) != ""
    assert watched(guard, 0.2, 1.0) == ""


def test_state_survives_a_round_trip():
    guard = Guardrails(GuardrailConfig())
    steady(guard)
    again = Guardrails(GuardrailConfig())
    again.load_state_dict(dict(guard.state_dict()))
    assert watched(again, 5.0, 1.0) == watched(guard, 5.0, 1.0)


def test_a_state_without_the_ranges_of_later_alarms_is_taken():
    """As checkpoints hold it that were written before there were others than these two ranges."""
    guard = Guardrails(GuardrailConfig())
    guard.load_state_dict({"norms": [1.0], "rewards": [0.5], "alarms": 0})
    assert guard.state_dict() == {"norms": [1.0], "rewards": [0.5], "gaps": {}, "scores": {}, "waits": {}, "alarms": 0}


def test_rewards_that_differ_by_more_than_chance_are_noticed_until_the_next_comparison():
    guard = Guardrails(GuardrailConfig(parity_interval=2))
    trainer = [0.1 * row for row in range(10)]
    noisy = [value + (0.2 if row % 2 else -0.15) for row, value in enumerate(trainer)]
    assert watched(guard, 0.2, 1.0, **parity_metrics(noisy, trainer)) == ""
    lower = [value - 0.2 - 0.01 * (row % 2) for row, value in enumerate(trainer)]
    said = watched(guard, 0.2, 1.0, **parity_metrics(lower, trainer))
    assert "reward_parity: on the same held-out prompts the engine's samples have the mean reward 0.245 and" in said
    assert "trainer's 0.45, 0.205 apart with a standard error of 0.0017 (limit 0.03)" in said
    assert "reward_parity" in watched(guard, 0.2, 1.0)
    assert watched(guard, 0.2, 1.0, **parity_metrics(trainer, trainer)) == ""
    assert "reward_parity" in watched(guard, 0.2, 1.0, **parity_metrics([0.0] * 3, [1.0] * 3)), "always another one"
    assert parity_metrics([1.0], [0.0]) == {}


def test_a_sure_but_small_difference_of_rewards_is_rounding():
    guard = Guardrails(GuardrailConfig(parity_interval=1))
    trainer = [0.1 * row for row in range(10)]
    assert watched(guard, 0.2, 1.0, **parity_metrics([value + 1e-3 for value in trainer], trainer)) == ""


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="off, warn, stop, rollback"):
        GuardrailConfig(**dict[str, Any](action="halt"))
    with pytest.raises(ConfigError, match="warmup = 30 must be at most window = 20"):
        GuardrailConfig(warmup=30)
