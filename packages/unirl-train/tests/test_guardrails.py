"""The running range: silent in a steady run, loud before a collapse."""

from typing import Any

import pytest

from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.types.errors import ConfigError


def steady(guard, num=10):
    for i in range(num):
        assert guard.observe(0.20 + 0.01 * (i % 3), 1.0 + 0.02 * (i % 2)) is None


def test_the_gradient_norms_that_preceded_a_collapse_are_noticed():
    guard = Guardrails(GuardrailConfig(action="stop"))
    steady(guard)
    assert guard.observe(0.47, 1.0) is None
    assert "running median" in (guard.observe(0.89, 1.0) or "")
    assert not guard.acts
    assert "12.4 times" in (guard.observe(2.6, 1.0) or "")
    assert guard.acts


def test_a_fall_of_the_reward_is_noticed():
    guard = Guardrails(GuardrailConfig(action="warn"))
    steady(guard)
    assert "fell" in (guard.observe(0.2, 0.2) or "")
    guard.observe(0.2, 0.2)
    assert not guard.acts


def test_a_non_finite_norm_alarms_at_once_and_values_that_alarm_do_not_move_the_range():
    guard = Guardrails(GuardrailConfig())
    assert "not finite" in (guard.observe(float("nan"), 1.0) or "")
    steady(guard)
    for _ in range(5):
        assert guard.observe(9.0, 1.0) is not None
    assert guard.observe(0.2, 1.0) is None


def test_state_survives_a_round_trip():
    guard = Guardrails(GuardrailConfig())
    steady(guard)
    again = Guardrails(GuardrailConfig())
    again.load_state_dict(dict(guard.state_dict()))
    assert again.observe(5.0, 1.0) == guard.observe(5.0, 1.0)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="off, warn, stop, rollback"):
        GuardrailConfig(**dict[str, Any](action="halt"))
    with pytest.raises(ConfigError, match="warmup = 30 must be at most window = 20"):
        GuardrailConfig(warmup=30)
