"""Named copies of the weights, by track and by policy."""

import pytest

from unirl.types.copies import Copies, copy_of, merged_copies


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
