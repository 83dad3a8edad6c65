"""Crop and zoom: what they show, and what they say of a call that cannot be made."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.environments.tools.images import Crop, Zoom
from unirl.rollout.turns.calls import ToolCall, Turn
from unirl.types.errors import ConfigError
from unirl.types.media import shown_image, shown_pixels
from unirl.types.messages import ShownImage

PIXELS = torch.rand(3, 20, 40, generator=torch.Generator().manual_seed(0))
TASK: Any = {"images": (shown_image(PIXELS), ShownImage(1, 1000, bytes(3000)))}


def shown(answer: Any) -> torch.Tensor:
    (image,) = answer.images
    return shown_pixels(image)


def test_a_crop_shows_the_pixels_of_its_box():
    whole = shown_pixels(TASK["images"][0])
    assert torch.equal(shown(Crop()({"box": [3, 5, 23, 15]}, TASK)), whole[:, 5:15, 3:23])
    assert torch.equal(shown(Crop()({"box": [0, 0, 40, 20], "image": 1}, TASK)), whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"box": [5, 0, 5, 20]}, r"box \[5, 0, 5, 20\] must have left < right <= 40 and top < bottom <= 20"),
        ({"box": [0, 0, 41, 20]}, "right <= 40"),
        ({"box": [9, 9, 8, 20]}, "left < right"),
        ({"box": [0, 0, 7, 20]}, "has a side of 7 pixels; the smallest is 8"),
        ({"box": [0, 0, 8, 8], "image": 3}, "there is no image 3; the question has 2"),
    ],
)
def test_a_box_that_cannot_be_shown_is_said_to_the_model(arguments, words):
    with pytest.raises(ToolError, match=words):
        Crop()(arguments, TASK)


def test_stripes_are_not_shown():
    with pytest.raises(ToolError, match="sides of 1 and 1000 pixels; the largest ratio is 100"):
        Crop(min_side=1)({"box": [0, 0, 1000, 1], "image": 2}, TASK)


def test_zoom_enlarges_what_surrounds_a_point_and_stays_within_the_image():
    corner = shown(Zoom()({"x": 0, "y": 0, "factor": 2}, TASK))
    assert corner.shape == PIXELS.shape
    blocks = torch.zeros(3, 20, 40)
    blocks[:, :10, :20] = 1.0
    task: Any = {"images": (shown_image(blocks),)}
    assert shown(Zoom()({"x": 2, "y": 3, "factor": 2}, task))[:, :16, :32].min() > 0.9
    assert shown(Zoom()({"x": 39, "y": 19, "factor": 2}, task))[:, 4:, 8:].max() < 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": 40, "y": 0, "factor": 2}, r"\(40, 0\) lies beyond the image of 40 x 20 pixels"),
        ({"x": 0, "y": 0, "factor": 1}, "factor 1 must be above 1 and at most 8"),
        ({"x": 0, "y": 0, "factor": 9}, "factor 9 must be above 1"),
        ({"x": 0, "y": 0, "factor": 1e308}, "must be above 1"),
    ],
)
def test_a_zoom_that_cannot_be_shown_is_said_to_the_model(arguments, words):
    with pytest.raises(ToolError, match=words):
        Zoom()(arguments, TASK)


def test_zooming_out_is_refused():
    with pytest.raises(ConfigError, match="max_factor = 1 enlarges nothing"):
        Zoom(max_factor=1)


def test_without_an_image_there_is_nothing_to_show():
    with pytest.raises(ToolError, match="there is no image 1; the question has 0"):
        Crop()({"box": [0, 0, 8, 8]}, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["crop", "zoom"]), st.dictionaries(st.sampled_from(["box", "x", "y", "factor", "image"]), JSON))
def test_whatever_a_model_asks_for_it_is_told_or_shown_something(name, arguments):
    environment = pickle.loads(pickle.dumps(ToolUse({"crop": Crop(), "zoom": Zoom()})))
    environment.reset(TASK, 0)
    (message,) = environment.step(Turn("", (ToolCall(name, arguments),))).observation
    assert message.content.startswith("error: ") != bool(message.images)
