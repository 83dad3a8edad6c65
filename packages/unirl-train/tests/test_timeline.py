"""When what worked: spans of phases and calls, and their file."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from served_fakes import LocalMember, pool_of

from unirl.distributed.spans import MOST, SHORTEST_S, Span, SpanLog
from unirl.trainer.clock import PhaseClock
from unirl.trainer.timeline import Timeline


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_phases_of_two_threads_say_what_each_is_about():
    clock = PhaseClock()

    def generate() -> None:
        with clock.about(rollout=4, request=9, version=3):
            for phase in ("other", "rollout"):
                with clock.phase(phase):
                    time.sleep(2 * SHORTEST_S)

    thread = threading.Thread(target=generate)
    with clock.about(rollout=3), clock.phase("train"):
        thread.start()
        thread.join()
    with clock.phase("checkpoint"):
        time.sleep(2 * SHORTEST_S)
    spans = clock.spans.take()
    assert [(span.lane, span.what, dict(span.about)) for span in spans] == [
        ("engine", "other", {"rollout": 4, "request": 9, "version": 3}),
        ("engine", "rollout", {"rollout": 4, "request": 9, "version": 3}),
        ("learner", "train", {"rollout": 3}),
        ("learner", "checkpoint", {}),
    ]
    assert spans[2].begin <= spans[0].begin < spans[0].end <= spans[1].begin
    assert spans[1].end <= spans[2].end <= spans[3].begin
    assert clock.spans.take() == []


def test_short_spans_are_left_out_and_the_oldest_go_where_none_takes_them():
    log = SpanLog()
    log.add(Span("a", "b", 0, SHORTEST_S / 2))
    assert log.take() == []
    for number in range(MOST + 1):
        log.add(Span("a", "b", number, number + 1))
    assert [span.begin for span in log.take()][:1] == [1]


def test_a_served_pool_has_a_lane_per_member():
    with pool_of(LocalMember(0), LocalMember(1)) as pool:
        assert sorted(span.lane for span in pool.take_spans()) == sorted(member.name for member in pool.members)


def test_lines_have_the_time_of_day_and_the_step(tmp_path: Path):
    timeline, now = Timeline(tmp_path / "timeline.jsonl"), time.monotonic()
    timeline.write([Span("engine", "rollout", now - 1, now, {"rollout": 0})], 1)
    (line,) = lines(tmp_path / "timeline.jsonl")
    begin, end = line.pop("begin"), line.pop("end")
    assert line == {"step": 1, "lane": "engine", "what": "rollout", "rollout": 0}
    assert isinstance(end, float) and abs(end - time.time()) < 5 and end - begin == pytest.approx(1, abs=1e-3)


def test_a_resumed_run_drops_what_is_past_its_checkpoint_and_a_new_one_all(tmp_path: Path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    for step in (1, 2, 3):
        timeline.write([Span("engine", "rollout", step, step + 1)], step)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "la')  # a killed run
    Timeline(path).start(2)
    assert [line["step"] for line in lines(path)] == [1, 2]
    Timeline(path).start(None)
    assert not path.exists()


def test_the_older_half_goes_where_the_file_is_large(tmp_path: Path):
    timeline = Timeline(tmp_path / "timeline.jsonl", max_bytes=1000)
    for step in range(100):
        timeline.write([Span("engine", "rollout", step, step + 1)], step)
    kept = [line["step"] for line in lines(tmp_path / "timeline.jsonl")]
    assert kept[-1] == 99 and 3 < len(kept) < 12 and kept == sorted(kept)


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    timeline = Timeline(tmp_path / "no" / "timeline.jsonl")
    for step in (1, 2):
        timeline.write([Span("engine", "rollout", 0, 1)], step)
    assert len(caplog.records) == 1 and "continues without it" in caplog.text
