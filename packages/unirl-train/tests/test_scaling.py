"""Sizes of pools that are asked for while a run trains."""

import pytest

from unirl.trainer.scaling import SCALE_FILE, ask_for_sizes, take_sizes
from unirl.types.errors import ConfigError


def test_what_is_asked_for_is_taken_once_and_the_last_word_counts(tmp_path) -> None:
    assert take_sizes(tmp_path) == {}
    ask_for_sizes(tmp_path, {"rollout": 1, "writer": 2})
    ask_for_sizes(tmp_path, {"rollout": 3})
    assert take_sizes(tmp_path) == {"rollout": 3}
    assert take_sizes(tmp_path) == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[1]", '{"rollout": "two"}', '{"rollout": true}'])
def test_a_file_that_asks_for_nothing_is_named_and_gone(tmp_path, text) -> None:
    (tmp_path / SCALE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=f"{SCALE_FILE} asks for no sizes of pools"):
        take_sizes(tmp_path)
    assert take_sizes(tmp_path) == {}
