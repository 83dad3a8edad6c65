"""GenEval's rules on hand-made detections."""

import pytest

from unirl.reward.local.detection.geneval_rules import (
    Detection,
    Verdict,
    check_row,
    iou,
    judged,
    kept,
    relations,
    why_wrong,
)
from unirl.types.errors import ConfigError


def thing(label="dog", score=0.95, box=(0, 0, 10, 10)):
    return Detection(label, score, box)


def nobody(objects):
    raise AssertionError("no colour is asked for")


def verdict(objects, include, exclude=(), colours=nobody, **row):
    return judged(kept(objects, 0.3), {"include": include, "exclude": list(exclude), **row}, colours)


def test_objects_are_kept_by_class_the_surest_first_above_the_threshold():
    found = kept([thing(score=0.4), thing("cat", 0.9), thing(score=0.8), thing(score=0.3)], 0.3)
    assert {label: [each.score for each in objects] for label, objects in found.items()} == {
        "cat": [0.9],
        "dog": [0.8, 0.4],
    }
    many = [thing(score=0.31 + i / 100) for i in range(20)]
    assert len(kept(many, 0.3)["dog"]) == 16
    assert len(kept(many, 0.3, max_objects=3)["dog"]) == 3


def test_overlapping_objects_are_dropped_only_where_asked():
    pair = [
        thing(score=0.9, box=(0, 0, 9, 9)),
        thing(score=0.8, box=(0, 0, 9, 9)),
        thing(score=0.7, box=(20, 0, 29, 9)),
    ]
    assert len(kept(pair, 0.3)["dog"]) == 3
    assert [each.score for each in kept(pair, 0.3, max_overlap=0.9)["dog"]] == [0.9, 0.7]


def test_the_overlap_of_boxes_counts_their_corner_pixels():
    assert iou((0, 0, 9, 9), (0, 0, 9, 9)) == 1.0
    assert iou((0, 0, 9, 9), (5, 0, 14, 9)) == pytest.approx(50 / 150)
    assert iou((0, 0, 9, 9), (10, 10, 19, 19)) == 0.0


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ((0, 0, 10, 10), (50, 0, 60, 10), {"left of"}),
        ((50, 0, 60, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 50, 10, 60), {"above"}),
        ((0, 50, 10, 60), (0, 0, 10, 10), {"below"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),
        ((0, 0, 10, 10), (50, 20, 60, 30), {"left of"}),  # 18 of 53.9 is no half
        ((0, 0, 10, 10), (1, 0, 11, 10), set()),  # within the threshold of their sizes
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        ((0, 0, 100, 100), (15, 0, 115, 100), set()),
    ],
)
def test_relative_positions(a, b, found):
    assert relations(a, b) == found


def test_without_a_threshold_any_offset_is_a_position():
    assert relations((0, 0, 10, 10), (1, 0, 11, 10), threshold=0.0) == {"left of"}


def test_single_object():
    asked = [{"class": "dog", "count": 1}]
    assert verdict([thing()], asked) == Verdict(1.0, 1.0, 1.0)
    assert verdict([], asked) == Verdict(0.0, 0.0, 0.0)
    assert verdict([thing(), thing()], asked) == Verdict(strict=0.0, score=0.0, reward=1.0)


def test_two_objects():
    asked = [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]
    assert verdict([thing(), thing("cat")], asked) == Verdict(1.0, 1.0, 1.0)
    assert verdict([thing(), thing("bird")], asked) == Verdict(0.0, 0.5, 0.0)


def test_counting_excludes_one_more():
    asked, over = [{"class": "dog", "count": 3}], [{"class": "dog", "count": 4}]
    assert verdict([thing()] * 3, asked, over) == Verdict(1.0, 1.0, 1.0)
    assert verdict([thing()] * 2, asked, over) == Verdict(0.0, 1 - 1 / 3, 0.0)
    assert verdict([thing()] * 4, asked, over) == Verdict(0.0, 1 - 1 / 3, 0.0)
    assert verdict([thing()] * 9, asked, over) == Verdict(0.0, -1.0, 0.0)


def test_a_colour_is_asked_of_the_surest_objects():
    colours = {0.9: "red", 0.8: "blue"}

    def colours_of(objects):
        return [colours[each.score] for each in objects]

    asked = [{"class": "dog", "count": 1, "color": "red"}]
    assert verdict([thing(score=0.9)], asked, colours=colours_of) == Verdict(1.0, 1.0, 1.0)
    assert verdict([thing(score=0.8)], asked, colours=colours_of) == Verdict(0.0, 0.5, 0.0)
    both = [thing(score=0.8), thing(score=0.9)]
    assert verdict(both, asked, colours=colours_of) == Verdict(0.0, 0.0, reward=1.0)


def test_colour_attribution_of_two_objects():
    asked = [{"class": "dog", "count": 1, "color": "red"}, {"class": "cat", "count": 1, "color": "blue"}]

    def swapped(objects):
        return ["blue" if each.label == "dog" else "red" for each in objects]

    def right(objects):
        return ["red" if each.label == "dog" else "blue" for each in objects]

    found = [thing(), thing("cat")]
    assert verdict(found, asked, colours=right) == Verdict(1.0, 1.0, 1.0)
    assert verdict(found, asked, colours=swapped) == Verdict(0.0, 0.5, 0.0)


def test_a_position_refers_to_an_earlier_clause():
    asked = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]
    dog, cat = thing(box=(0, 0, 10, 10)), thing("cat", box=(50, 0, 60, 10))
    assert verdict([dog, cat], asked) == Verdict(1.0, 1.0, 1.0)
    wrong = [asked[0], asked[1] | {"position": ["right of", 0]}]
    assert verdict([dog, cat], wrong) == Verdict(0.0, 2 / 3, 0.0)
    assert verdict([dog], asked) == Verdict(0.0, 1 / 3, 0.0)
    assert verdict([cat], asked) == Verdict(0.0, 1 / 3, 0.0)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (None, "has no include clauses"),
        ({"include": []}, "has no include clauses"),
        ({"include": [{"class": "dgo", "count": 1}]}, r"'dgo', which the detector does not know.*\['dog'\]"),
        ({"include": [{"class": "dog"}]}, "count = None of dog"),
        ({"include": [{"class": "dog", "count": 0}]}, "count = 0 of dog"),
        ({"include": [{"class": "dog", "count": 1, "color": "teal"}]}, "the color 'teal'; it must be one of"),
        ({"include": [{"class": "dog", "count": 1, "position": ["above", 0]}]}, "the index of an earlier clause"),
        ({"include": [{"class": "dog", "count": 1}], "exclude": [{"class": "cow", "count": 1}]}, "'cow', which"),
    ],
)
def test_a_wrong_row_is_named(row, text):
    with pytest.raises(ConfigError, match=f"sample s0.*{text}"):
        check_row(row, ["dog", "cat"], "sample s0")


def test_what_is_wrong_is_said_in_the_words_of_genevals_results():
    def all_blue(objects):
        return ["blue"] * len(objects)

    dog, cat = thing(box=(0, 0, 10, 10)), thing("cat", box=(50, 0, 60, 10))
    row = {"include": [{"class": "dog", "count": 2}, {"class": "cat", "count": 1, "position": ["left of", 0]}]}
    objects = kept([dog, cat], 0.3)
    assert why_wrong(objects, row, nobody) == ["expected dog>=2, found 1", "no target for cat to be left of"]
    row = {"include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}]}
    assert why_wrong(objects, row, nobody) == ["expected cat above target, found right of target"]
    row = {"include": [{"class": "dog", "count": 1, "color": "red"}], "exclude": [{"class": "cat", "count": 1}]}
    assert why_wrong(objects, row, all_blue) == [
        "expected red dog>=1, found 0 red; and 1 blue",
        "expected cat<1, found 1",
    ]
    assert why_wrong(objects, {"include": [{"class": "dog", "count": 1}]}, nobody) == []
