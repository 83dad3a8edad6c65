"""What a process is doing, and how long it has been silent."""

import threading

import pytest

from unirl.types import heartbeat
from unirl.types.heartbeat import Activity, Heartbeat, Report


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_a_report_names_the_call_its_time_and_the_line_where_it_is(clock) -> None:
    activity, begun, may_end = Activity(), threading.Event(), threading.Event()

    def work() -> None:
        with activity.doing("engine.generate"):
            begun.set()
            may_end.wait(60)  # the line

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(60)
    clock[0] += 12
    report = activity.report()
    may_end.set()
    thread.join()
    assert (report.doing, report.since_s) == ("engine.generate", 12.0)
    assert (
        str(report).startswith("in engine.generate for 12 s, at\n") and "may_end.wait(60)  # the line" in report.stack
    )
    assert str(activity.report()) == "waits for a call"


def test_silence_is_told_after_a_minute_and_after_each_doubling_with_what_was_heard_last(clock) -> None:
    beats = Heartbeat("worker-1")
    clock[0] += 59
    assert beats.silence() is None
    clock[0] += 1
    assert beats.silence() == "worker-1 has given no sign of life for 60 s. It has given none yet."
    clock[0] += 59
    assert beats.silence() is None
    clock[0] += 1
    assert "no sign of life for 120 s" in (beats.silence() or "")
    beats.beat(Report("sync.push", 3.0, "push.py, line 7"))
    assert str(beats.report) == "in sync.push for 3 s, at\npush.py, line 7"
    clock[0] += 60
    found = beats.silence()
    assert found is not None and found.endswith("It was last heard 60 s ago: in sync.push for 3 s, at\npush.py, line 7")
