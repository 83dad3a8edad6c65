"""The shapes world: every prompt, the scenes that fit it, scenes that nearly fit it, and how a scene is drawn.

A scene is a layout: what stands in each of the four quadrants of a 32 x 32 image. Position and size jitter come on
top when a layout is drawn. The grammar of prompts and the palette are those of the verifier.
`python -m unirl.worlds.shapes.world --out DIR` writes the prompt files.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unirl.pretraining.prompt_files import split_keys, write_from_command_line, write_split
from unirl.reward.worlds.shapes_grammar import (
    CATEGORIES,
    COLORS,
    PALETTE,
    RELATIONS,
    SHAPES,
    PromptSpec,
    ShapeObject,
    parse_prompt,
    prompt_of,
)

IMAGE_SIDE = 32
"""Pixels."""
QUADRANTS: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of each quadrant."""
OBJECTS: tuple[ShapeObject, ...] = tuple(ShapeObject(color, shape) for color in COLORS for shape in SHAPES)
HELDOUT_FRACTION = 0.25
POSITION_FRACTION = 1 / 6
"""Share of the position prompts that the files for RL keep; with all of them three rows in four would be positions."""

Layout = tuple[ShapeObject | None, ShapeObject | None, ShapeObject | None, ShapeObject | None]

NEAR_MISS_FRACTION: Mapping[str, float] = MappingProxyType(
    {"single": 0.50, "color": 0.45, "two": 0.42, "count": 0.45, "position": 0.42}
)
"""Share of the pretraining images of each category that are wrong for their caption in one respect."""

_CENTER_JITTER = 1.5
_RADIUS_RANGE = (4.8, 6.2)
_SUPERSAMPLING = 4


def all_prompts() -> list[str]:
    """Every prompt of the world in a fixed order: 12 single, 36 color, 72 two, 48 count, 432 position."""
    specs = [PromptSpec("single", (item,)) for item in OBJECTS]
    specs += [PromptSpec("count", (item,) * number) for number in (1, 2, 3, 4) for item in OBJECTS]
    for first, second in itertools.permutations(OBJECTS, 2):
        if first.color == second.color:
            continue
        if first.shape == second.shape:
            specs.append(PromptSpec("color", (first, second)))
        else:
            specs.append(PromptSpec("two", (first, second)))
        specs += [PromptSpec("position", (first, second), relation) for relation in RELATIONS]
    return sorted((prompt_of(spec) for spec in specs), key=lambda text: CATEGORIES.index(parse_prompt(text).category))


def scene_key(spec: PromptSpec) -> str:
    """Names what the image must show, so that two wordings of one request share a key.

    "a red circle left of a blue square" and "a blue square right of a red circle" are one request, and so are
    "a red circle" and "one red circle".
    """
    if spec.relation in ("right of", "below"):
        opposite = RELATIONS[RELATIONS.index(spec.relation) - 1]
        spec = replace(spec, objects=spec.objects[::-1], relation=opposite)
    items = spec.objects if spec.relation else sorted(spec.objects)
    return f"{spec.relation or 'all'}: " + ", ".join(map(str, items))


def split_prompts() -> tuple[list[str], list[str]]:
    """Training and held-out prompts for RL; a quarter of the requests of every category is held out.

    The split is by `scene_key`, in the order of its hash, so no held-out request appears in training in other words.
    Of the position requests each side keeps POSITION_FRACTION. Pretraining sees `all_prompts`.
    """
    keys: dict[str, set[str]] = {}
    for prompt in all_prompts():
        spec = parse_prompt(prompt)
        family = "single" if len(spec.objects) == 1 else spec.category
        keys.setdefault(family, set()).add(scene_key(spec))
    kept = {"position": POSITION_FRACTION}
    train, heldout = split_keys(keys, heldout_fraction=HELDOUT_FRACTION, kept=kept)
    by_key = [(scene_key(parse_prompt(prompt)), prompt) for prompt in all_prompts()]
    return [prompt for key, prompt in by_key if key in train], [prompt for key, prompt in by_key if key in heldout]


def write_prompts(folder: Path) -> None:
    """Write `train.jsonl` and `heldout.jsonl`: rows of prompt, prompt_id and metadata.category."""
    write_split(folder, "shapes", split_prompts(), lambda prompt: parse_prompt(prompt).category)


def all_layouts() -> list[Layout]:
    """Every layout that a caption or a near miss can call for: up to two objects, or three or four alike."""
    layouts: list[Layout] = []
    for number in (1, 2, 3, 4):
        for places in itertools.combinations(range(4), number):
            contents = itertools.product(OBJECTS, repeat=number) if number <= 2 else [(o,) * number for o in OBJECTS]
            layouts += [_layout(dict(zip(places, items, strict=True))) for items in contents]
    return layouts


def layouts_for(spec: PromptSpec) -> list[Layout]:
    """Every layout that shows exactly what `spec` asks for."""
    if spec.relation is not None:
        return [
            _layout({p: spec.objects[0], q: spec.objects[1]})
            for p, q in itertools.permutations(range(4), 2)
            if _stands(p, q, spec.relation)
        ]
    arrangements = sorted(set(itertools.permutations(spec.objects)))
    return [
        _layout(dict(zip(places, items, strict=True)))
        for places in itertools.combinations(range(4), len(spec.objects))
        for items in arrangements
    ]


def near_miss(spec: PromptSpec, rng: np.random.Generator) -> Layout:
    """A layout that is wrong for `spec` in one respect: a colour, a shape, the number, the binding or the place."""
    first, second = spec.objects[0], spec.objects[-1]
    if spec.category == "single":
        other = OBJECTS[rng.integers(len(OBJECTS))]
        wrong = [(_recolored(first, rng),), (_reshaped(first, rng),), (first, other)][rng.integers(3)]
        return _draw(layouts_for(PromptSpec("count", wrong)), rng)
    if spec.category == "count":
        number = len(spec.objects)
        numbers = [n for n in (number - 1, number + 1) if 1 <= n <= 4]
        return _draw(layouts_for(PromptSpec("count", (first,) * numbers[rng.integers(len(numbers))])), rng)
    swapped = (replace(first, color=second.color), replace(second, color=first.color))
    altered = [(_recolored(first, rng), second), (first, _recolored(second, rng))]
    altered += [(_reshaped(first, rng), second), (first, _reshaped(second, rng))]
    if spec.category == "color":
        return _draw(layouts_for(PromptSpec("two", altered[rng.integers(4)])), rng)
    if spec.category == "two":
        return _draw(layouts_for(PromptSpec("two", [*altered, swapped, swapped][rng.integers(6)])), rng)
    if rng.random() < 0.6:
        assert spec.relation is not None  # noqa: S101 - the category is position
        misplaced = [pq for pq in itertools.permutations(range(4), 2) if not _stands(*pq, spec.relation)]
        p, q = misplaced[rng.integers(len(misplaced))]
        return _layout({p: first, q: second})
    return _draw(layouts_for(replace(spec, objects=altered[rng.integers(4)])), rng)


def sample_layout(spec: PromptSpec, rng: np.random.Generator, near_miss_fraction: float) -> Layout:
    """A layout for the caption `spec`, wrong in one respect with probability `near_miss_fraction`."""
    if rng.random() < near_miss_fraction:
        return near_miss(spec, rng)
    return _draw(layouts_for(spec), rng)


def render(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Draw a layout with jittered centres and sizes; uint8 [3, 32, 32], black background, antialiased."""
    picture = np.zeros((3, IMAGE_SIDE, IMAGE_SIDE))
    for (row, column), item in zip(QUADRANTS, layout, strict=True):
        if item is None:
            continue
        center = (np.array([row, column]) + 0.5) * IMAGE_SIDE / 2 + rng.uniform(-_CENTER_JITTER, _CENTER_JITTER, 2)
        cover = coverage(item.shape, center, rng.uniform(*_RADIUS_RANGE))
        picture += cover * np.array(PALETTE[item.color])[:, None, None]
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8)


def coverage(shape: str, center_yx: np.ndarray, radius: float) -> np.ndarray:
    """Share of each pixel that a shape of half height `radius` covers, [32, 32] in [0, 1]; lengths in pixels."""
    fine = IMAGE_SIDE * _SUPERSAMPLING
    axis = (np.arange(fine) + 0.5) / _SUPERSAMPLING
    y, x = (axis - center_yx[0])[:, None] / radius, (axis - center_yx[1])[None, :] / radius
    return _inside(shape, y, x).reshape(IMAGE_SIDE, _SUPERSAMPLING, IMAGE_SIDE, _SUPERSAMPLING).mean((1, 3))


def _inside(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """True if a point is inside a shape of half height 1 around the origin; y points down."""
    if shape == "circle":
        return y**2 + x**2 <= 1
    if shape == "square":
        return (np.abs(y) <= 0.92) & (np.abs(x) <= 0.92)
    return (np.abs(y) <= 1) & (2 * np.abs(x) <= y + 1)


def _layout(contents: Mapping[int, ShapeObject]) -> Layout:
    return (contents.get(0), contents.get(1), contents.get(2), contents.get(3))


def _stands(first: int, second: int, relation: str) -> bool:
    """True if quadrant `first` is `relation` quadrant `second`; a diagonal satisfies two relations."""
    (row_a, column_a), (row_b, column_b) = QUADRANTS[first], QUADRANTS[second]
    return {
        "left of": column_a < column_b,
        "right of": column_a > column_b,
        "above": row_a < row_b,
        "below": row_a > row_b,
    }[relation]


def _recolored(item: ShapeObject, rng: np.random.Generator) -> ShapeObject:
    others = [color for color in COLORS if color != item.color]
    return replace(item, color=others[rng.integers(len(others))])


def _reshaped(item: ShapeObject, rng: np.random.Generator) -> ShapeObject:
    others = [shape for shape in SHAPES if shape != item.shape]
    return replace(item, shape=others[rng.integers(len(others))])


def _draw(options: Sequence[Layout], rng: np.random.Generator) -> Layout:
    return options[int(rng.integers(len(options)))]


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
