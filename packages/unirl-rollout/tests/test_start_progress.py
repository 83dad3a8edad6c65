"""An engine that loads for long says so, and what it does, until it answers or fails."""

import logging
import time

import pytest

from unirl.rollout.engine import start_progress as module
from unirl.rollout.engine.start_progress import last_line, start_progress


def test_a_slow_start_names_its_log_and_then_its_last_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    log = tmp_path / "engine.log"
    log.write_text("Loading weights: 10%\rLoading weights: 20%\n\n")
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="died"):
        with start_progress("Engine (pid 7)", log):
            deadline = time.monotonic() + 60
            while len(caplog.messages) < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            raise RuntimeError("died")
    first, second = caplog.messages[:2]
    assert first == f"Engine (pid 7) starts and loads its model; its log is {log}"
    assert second.startswith("Engine (pid 7) has been starting for 0 s: Loading weights: 20%")
    said = len(caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) == said


def test_a_log_that_is_empty_or_not_there_has_no_last_line(tmp_path):
    (tmp_path / "log").write_text(" \n\n")
    assert last_line(tmp_path / "log") == last_line(tmp_path / "none") == ""
