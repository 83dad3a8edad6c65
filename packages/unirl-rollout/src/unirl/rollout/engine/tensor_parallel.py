"""Rules of engines that split a language model over devices (`tensor_parallel_size`). See `unirl.types.recipe`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.types.recipe import Machine, Messages, Part, Run

_KEYS_AND_VALUES = "num_key_value_heads"
_SPLIT = ("num_attention_heads", "intermediate_size")
_SPLIT_VISION = ("num_heads", "intermediate_size")


def size_fits_gpus(own: Part, run: Run) -> Messages:
    """The GPUs that the engine is given are as many as it is split over."""
    size, gpus = own.get("tensor_parallel_size", 1), own.get("gpus")
    if gpus is not None and run.device == "cpu":
        yield f"{own.at}.gpus = {list(gpus)} does nothing with device: cpu. Set it to null."
    elif gpus is not None and len(gpus) != size:
        yield (
            f"{own.at}.tensor_parallel_size = {size} needs {size} GPUs, {own.at}.gpus = {list(gpus)} names "
            f"{len(gpus)}. Change one of them."
        )
    elif gpus is None and size > 1 and run.device == "cuda" and run.runtime == "ray":
        yield (
            f"{own.at}.tensor_parallel_size = {size}, but a worker of runtime: ray sees one GPU. Name {size} GPUs of "
            f"its host in {own.at}.gpus, which nothing else uses."
        )


def heads_divide(own: Part, run: Run, machine: Machine) -> Messages:
    """A model of this machine has heads and layers that can be dealt evenly, and there are GPUs for it."""
    size = own.get("tensor_parallel_size", 1)
    if size == 1:
        return
    if run.device == "cuda" and own.get("url") is None and size > machine.num_gpus:
        yield (
            f"{own.at}.tensor_parallel_size = {size}, but this machine has {machine.num_gpus} "
            f"GPU{'' if machine.num_gpus == 1 else 's'}. Lower it."
        )
    path = Path(str(own.node.get("model"))) / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for name, number in _dealt(config, size):
            yield (
                f"{own.at}.tensor_parallel_size = {size} does not divide {name} = {number} of {path}. Set it to one of "
                f"{', '.join(str(each) for each in range(1, number + 1) if number % each == 0)[:80]}."
            )


def _dealt(config: Mapping[str, Any], size: int) -> Iterator[tuple[str, int]]:  # Any: JSON
    """What cannot be dealt to so many devices: its name in the configuration, and how many there are."""
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    numbers = {name: text.get(name) for name in _SPLIT}
    numbers |= {f"vision_config.{name}": vision.get(name) for name in _SPLIT_VISION}
    yield from ((name, number) for name, number in numbers.items() if isinstance(number, int) and number % size)
    heads = text.get(_KEYS_AND_VALUES)
    if isinstance(heads, int) and heads % size and size % heads:  # fewer than devices are copied
        yield _KEYS_AND_VALUES, heads
