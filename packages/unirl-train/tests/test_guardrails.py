"""The running range: silent in a steady run, loud before a collapse."""

from typing import Any

import pytest

from unirl.trainer.guardrails import GuardrailConfig, Guardrails
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


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="off, warn, stop, rollback"):
        GuardrailConfig(**dict[str, Any](action="halt"))
    with pytest.raises(ConfigError, match="warmup = 30 must be at most window = 20"):
        GuardrailConfig(warmup=30)
