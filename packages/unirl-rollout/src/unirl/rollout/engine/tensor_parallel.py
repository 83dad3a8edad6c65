"""Rules of engines that split a language model over devices (`num_devices`). See `unirl.types.recipe`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.types.recipe import Machine, Messages, Part, Run

_KEYS_AND_VALUES = "num_key_value_heads"
_SPLIT = ("num_attention_heads", "intermediate_size")
_SPLIT_VISION = ("num_heads", "intermediate_size")


def heads_divide(own: Part, run: Run, machine: Machine) -> Messages:
    """The heads and layers of a local model can be split evenly."""
    size = own.get("num_devices", 1)
    if size == 1:
        return
    path = Path(str(own.node.get("model"))) / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for name, number in _dealt(config, size):
            yield (
                f"{own.at}.num_devices = {size} does not divide {name} = {number} of {path}. Set it to one of "
                f"{', '.join(str(each) for each in range(1, number + 1) if number % each == 0)[:80]}."
            )


def _dealt(config: Mapping[str, Any], size: int) -> Iterator[tuple[str, int]]:  # Any: JSON
    """What cannot be split over `size` devices: name in the configuration, and count."""
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    numbers = {name: text.get(name) for name in _SPLIT}
    numbers |= {f"vision_config.{name}": vision.get(name) for name in _SPLIT_VISION}
    yield from ((name, number) for name, number in numbers.items() if isinstance(number, int) and number % size)
    heads = text.get(_KEYS_AND_VALUES)
    if isinstance(heads, int) and heads % size and size % heads:  # fewer heads than devices are replicated
        yield _KEYS_AND_VALUES, heads
