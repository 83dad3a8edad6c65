"""Rows that bring their own images: which sample gets which, and how an image is named."""

import pytest

from unirl.types.errors import ContractError
from unirl.types.preference import given_image, given_score, sample_place, split_reference, tile_corner

ROW = {"images": ["good.png", "bad.png"], "scores": [1, 0]}


def test_a_sample_gets_the_image_and_the_score_of_its_place():
    assert [given_image(ROW, f"refill3:prompt:a:sample:{j}") for j in (0, 1)] == ["good.png", "bad.png"]
    assert [given_score(ROW, f"prompt:a#1:sample:{j}") for j in (1, 0)] == [0, 1]
    assert given_image({"category": "single"}, "s") is None and given_score(None, "s") is None
    with pytest.raises(ContractError, match=r"sample g:sample:2 has no entry in its row's images, which are 2"):
        given_image(ROW, "g:sample:2")


@pytest.mark.parametrize("name", ["prompt:a", "prompt:a:sample:", "prompt:a:sample:x"])
def test_an_id_without_a_place_is_refused(name: str):
    with pytest.raises(ContractError, match="does not end with :sample:"):
        sample_place(name)


def test_a_reference_names_a_file_or_a_tile():
    assert split_reference("a/b.png") == ("a/b.png", None)
    assert split_reference("a/b#1.png#12") == ("a/b#1.png", 12)
    assert split_reference("a#b.png") == ("a#b.png", None)


def test_tiles_are_counted_row_by_row():
    assert [tile_corner((4, 6), (2, 3), tile) for tile in range(5)] == [(0, 0), (0, 3), (2, 0), (2, 3), None]
    assert tile_corner((4, 7), (2, 3), 0) is None
