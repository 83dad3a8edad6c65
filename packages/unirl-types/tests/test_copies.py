"""Named copies of the weights, by track and by policy."""

import pytest

from unirl.types.copies import Copies, copies_of, copies_word, copy_of, merged_copies
from unirl.types.errors import ConfigError


@pytest.mark.parametrize(
    ("copies", "found"),
    [
        (None, None),
        ("ema", "ema"),
        ({}, None),
        ({"painter": "old"}, "old"),
        ({"image": "ema", "painter": "old"}, "ema"),
        ({"writer": "ema"}, None),
    ],
)
def test_a_track_counts_before_its_policy(copies: Copies, found: str | None):
    assert copy_of(copies, "image", "painter") == found


@pytest.mark.parametrize(
    ("by_track", "copies"),
    [
        ({}, None),
        ({"text": None, "image": None}, None),
        ({"text": "old", "image": "old"}, "old"),
        ({"text": None, "image": "old"}, {"image": "old"}),
    ],
)
def test_tracks_with_one_copy_are_one_word(by_track: dict[str, str | None], copies: Copies):
    assert merged_copies(by_track) == copies
    assert all(copy_of(copies, track, "default") == copy for track, copy in by_track.items())


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
