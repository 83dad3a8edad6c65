"""Bars of loading appear for what takes long only."""

import io
import time

import pytest

from unirl.models.causal_lm.progress import delay_loading_bars


@pytest.fixture
def transformers_logging():
    """transformers' switches, as they were afterwards."""
    logging = pytest.importorskip("transformers.utils.logging")
    was_on = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    logging.set_tqdm_hook(None)
    yield logging
    logging.set_tqdm_hook(None)
    if not was_on:
        logging.disable_progress_bar()


def bar(logging, seconds):
    out = io.StringIO()
    for _ in logging.tqdm(range(3), desc="Loading weights", file=out, mininterval=0, disable=False):
        time.sleep(seconds)
    return out.getvalue()


def test_quick_loading_shows_no_bar_and_slow_loading_does(transformers_logging):
    assert "Loading weights" in bar(transformers_logging, 0)
    delay_loading_bars(3600)
    assert bar(transformers_logging, 0) == ""
    delay_loading_bars(0.05)
    assert "Loading weights" in bar(transformers_logging, 0.04)
