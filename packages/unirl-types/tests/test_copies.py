"""Named copies of several policies in one word."""

import pytest

from unirl.types.copies import copies_of, copies_word
from unirl.types.errors import ConfigError


@pytest.mark.parametrize(
    ("copies", "word"),
    [
        ({}, None),
        ({"writer": None, "painter": None}, None),
        ({"writer": None, "painter": "old"}, "painter/old"),
        ({"writer": "ema", "painter": "old"}, "writer/ema,painter/old"),
    ],
)
def test_a_word_says_which_copy_each_policy_is_sampled_from(copies: dict[str, str | None], word: str | None):
    assert copies_word(copies) == word
    assert copies_of(word) == {policy: copy for policy, copy in copies.items() if copy is not None}


@pytest.mark.parametrize("word", ["old", "writer/", "/old", "", "writer/ema,writer/old", "writer/ema,"])
def test_what_names_no_copies_is_refused(word: str):
    with pytest.raises(ConfigError, match="names no copies of several policies. Write <policy>/<copy>"):
        copies_of(word)
