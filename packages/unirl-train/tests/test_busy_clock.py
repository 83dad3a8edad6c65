"""Seconds with a call under way: calls that overlap count once."""

import pytest

from unirl.distributed import busy_clock
from unirl.distributed.busy_clock import BusyClock


@pytest.fixture
def now(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(busy_clock.time, "monotonic", lambda: now[0])
    return now


def test_calls_that_overlap_count_once(now) -> None:
    clock = BusyClock()
    clock.begin()
    now[0] += 2
    clock.begin()
    now[0] += 3
    clock.end()
    now[0] += 1
    clock.end()
    now[0] += 50
    assert clock.take() == 6
    assert clock.take() == 0


def test_a_call_under_way_counts_so_far_and_the_rest_later(now) -> None:
    clock = BusyClock()
    with clock.call():
        now[0] += 4
        assert clock.take() == 4
        now[0] += 1
    with pytest.raises(ValueError), clock.call():
        now[0] += 2
        raise ValueError
    assert clock.take() == 3
