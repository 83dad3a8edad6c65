"""Forecasts of schedules: what the real loops were measured to reach, where parts take known times."""

import pytest

from unirl.trainer.loops.forecast import Durations, forecast
from unirl.types.errors import ContractError

MEASURED = {
    (0, 4): (0.59, 0.58, 0.59),
    (1, 1): (0.86, 0.89, 0.89),
    (1, 4): (0.97, 0.96, 0.93),
    (2, 1): (0.95, 0.97, 0.95),
    (2, 4): (0.97, 0.97, 0.95),
}
"""(max_staleness, requests per rollout) -> share of its own throughput that the slowest part reached, by the table of
docs/guides/async.md: 40 rollouts of the real loops, whose parts sleep."""
UNITS = (Durations(2, 1, 1), Durations(1, 2, 1), Durations(1, 1, 2))


@pytest.mark.parametrize(("max_staleness", "per_rollout"), list(MEASURED))
def test_a_forecast_is_what_the_real_loops_reach(max_staleness: int, per_rollout: int) -> None:
    for durations, measured in zip(UNITS, MEASURED[max_staleness, per_rollout], strict=True):
        found = forecast(durations, per_rollout=per_rollout, max_staleness=max_staleness, num_rollouts=40)
        reached = max(found.share(part) for part in found.worked_s)
        assert reached == pytest.approx(measured, abs=0.04), durations


def test_a_forecast_of_pipelined_rollouts_is_what_the_real_loop_reaches() -> None:
    for durations, measured in zip(UNITS, (0.77, 0.77, 0.78), strict=True):  # by the same table
        found = forecast(durations, per_rollout=4, max_staleness=0, is_pipelined=True, num_rollouts=40)
        assert max(found.share(part) for part in found.worked_s) == pytest.approx(measured, abs=0.04), durations


def test_a_pipelined_rollout_takes_one_request_of_each_other_part_longer_than_its_slowest() -> None:
    for durations in (Durations(4, 1, 2), Durations(2, 4, 1), Durations(2, 1, 4)):
        slowest, rest = 4, 3
        steady = forecast(durations, per_rollout=4, max_staleness=0, is_pipelined=True, spread=0.0)
        assert steady.step_s == pytest.approx(slowest + rest / 4)
        waiting = forecast(durations, per_rollout=4, max_staleness=0, spread=0.0)
        assert steady.step_s < waiting.step_s
    whole = forecast(Durations(4, 1, 2), per_rollout=1, max_staleness=0, is_pipelined=True, spread=0.0)
    assert whole.step_s == pytest.approx(7)


def test_without_spread_a_rollout_takes_the_slowest_part_and_the_push() -> None:
    steady = Durations(4, 1, 3, 0.5)
    ahead = forecast(steady, per_rollout=4, max_staleness=2, spread=0.0)
    assert ahead.step_s == pytest.approx(4.5, rel=0.01), "the engine begins nothing during a push"
    drawn = [forecast(steady, per_rollout=4, max_staleness=2, seed=seed).step_s for seed in range(3)]
    assert max(drawn) - min(drawn) < 0.02 * min(drawn)
    alone = forecast(steady, per_rollout=1, max_staleness=0, spread=0.0)
    assert alone.step_s == pytest.approx(4 + 1 + 3 + 0.5)
    assert alone.share("engine") == pytest.approx(4 / 8.5, rel=0.01)


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="ask for 1 at least"):
        forecast(UNITS[0], per_rollout=1, max_staleness=1, num_rollouts=0)
