"""What is known of each packaged recipe, as `docs/reference/recipes.py` has read it off the pages of results."""

from __future__ import annotations

import importlib.resources
import json

from unirl.config.catalog import RECIPES_MODULE

FILE = "evidence.json"
LEVELS = {
    "curve": "its own learning curve was measured",
    "algorithm": "a small world has learned with its algorithm",
    "pipeline": "its model gives what the stock pipeline of diffusers gives, on tiny weights",
    "memory": "one step was rehearsed at true size, so its memory is known",
    "GPU": "it ran on a GPU",
}
"""Level -> what it says of a recipe."""


def known(what: str) -> dict[str, list[str]]:
    """Recipe -> its `levels`, in the order of LEVELS, or the names of its `algorithms` or `models`."""
    text = (importlib.resources.files(RECIPES_MODULE) / FILE).read_text(encoding="utf-8")
    return {name: entry[what] for name, entry in json.loads(text).items()}
