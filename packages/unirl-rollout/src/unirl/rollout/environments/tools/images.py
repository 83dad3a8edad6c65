"""Tools that show a part of an image of the prompt again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.tools.base import Answer, Tool, ToolError
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.messages import ShownImage

LARGEST_RATIO = 100
"""Largest ratio of the sides of a part: vision towers resize no stripes."""
_NUMBER = {"type": "integer", "minimum": 1, "description": "which image of the question, counted from 1"}


@bounded("turns.environment.tools")
class Crop(Tool):
    """Shows a rectangle of an image of the prompt, in the pixels that the image has.

    min_side: smallest side of a rectangle in pixels. What is smaller, or reaches beyond the image, is an error that the
    model is told.
    """

    description: str = "Show a rectangle of an image of the question."
    parameters: Mapping[str, Any] = {  # Any: JSON
        "type": "object",
        "properties": {
            "box": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": 4,
                "maxItems": 4,
                "description": "left, top, right and bottom in pixels, right and bottom not included",
            },
            "image": _NUMBER,
        },
        "required": ["box"],
        "additionalProperties": False,
    }
    deterministic: bool = True
    shows_images: bool = True

    def __init__(self, *, min_side: PositiveInt = 8) -> None:
        self._min_side = min_side

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> Answer:  # Any: JSON
        """The rectangle. Raises ToolError for one that does not lie in the image, or is too small or narrow."""
        image = _asked_for(arguments, task)
        left, top, right, bottom = box = [int(each) for each in arguments["box"]]
        if not (left < right <= image.width and top < bottom <= image.height):
            raise ToolError(
                f"box {box} must have left < right <= {image.width} and top < bottom <= {image.height}, the size of "
                "the image"
            )
        short, long = sorted((right - left, bottom - top))
        if short < self._min_side:
            raise ToolError(f"box {box} has a side of {short} pixels; the smallest is {self._min_side}")
        if long > LARGEST_RATIO * short:
            raise ToolError(f"box {box} has sides of {short} and {long} pixels; the largest ratio is {LARGEST_RATIO}")
        return Answer("", (_shown(image.crop((left, top, right, bottom))),))


@bounded("turns.environment.tools")
class Zoom(Tool):
    """Shows what surrounds a point of an image of the prompt, enlarged to the size of the whole image.

    max_factor: largest enlargement. A point beyond the image, or another factor, is an error that the model is told.
    """

    description: str = "Show the surroundings of a point of an image of the question, enlarged."
    parameters: Mapping[str, Any] = {  # Any: JSON
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0, "description": "pixels from the left"},
            "y": {"type": "integer", "minimum": 0, "description": "pixels from the top"},
            "factor": {"type": "number", "description": "how many times larger, above 1"},
            "image": _NUMBER,
        },
        "required": ["x", "y", "factor"],
        "additionalProperties": False,
    }
    deterministic: bool = True
    shows_images: bool = True

    def __init__(self, *, max_factor: float = 8.0) -> None:
        if max_factor <= 1:
            raise ConfigError(f"turns.environment.tools: max_factor = {max_factor} enlarges nothing; set it above 1")
        self._max_factor = max_factor

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> Answer:  # Any: JSON
        """The surroundings, moved as far as they must be to lie in the image. Raises ToolError for a point beyond it,
        and a factor that is not above 1 or above the largest."""
        image = _asked_for(arguments, task)
        x, y, factor = int(arguments["x"]), int(arguments["y"]), float(arguments["factor"])
        if x >= image.width or y >= image.height:
            raise ToolError(f"({x}, {y}) lies beyond the image of {image.width} x {image.height} pixels")
        if not 1 < factor <= self._max_factor:
            raise ToolError(f"factor {factor:g} must be above 1 and at most {self._max_factor:g}")
        width, height = image.width / factor, image.height / factor
        left = min(max(x + 0.5 - width / 2, 0.0), image.width - width)
        top = min(max(y + 0.5 - height / 2, 0.0), image.height - height)
        part = image.resize(image.size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        return Answer("", (_shown(part),))


def _asked_for(arguments: Mapping[str, Any], task: Task) -> Image.Image:  # Any: JSON
    """The image that a call names. Raises ToolError if the prompt has no such image."""
    images: Sequence[ShownImage] = task.get("images", ())
    number = int(arguments.get("image", 1))
    if number > len(images):
        raise ToolError(f"there is no image {number}; the question has {len(images)}")
    image = images[number - 1]
    return Image.frombytes("RGB", (image.width, image.height), image.pixels)


def _shown(image: Image.Image) -> ShownImage:
    return ShownImage(image.height, image.width, image.tobytes())
