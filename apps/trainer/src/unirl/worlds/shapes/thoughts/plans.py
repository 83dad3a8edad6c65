"""Plans of images of shapes: what stands where, in words; and how the base errs in planning and in drawing.

A plan says every object with its quadrant: "two things: red square top left, green circle bottom right".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from unirl.reward.worlds.shapes_grammar import COLORS, NUMBERS, SHAPES, PromptSpec, ShapeObject
from unirl.worlds.shapes.world import Layout, layouts_for

PLACES = ("top left", "top right", "bottom left", "bottom right")
"""Names of the quadrants, in the order of a layout."""

MISREAD: Mapping[str, str] = MappingProxyType(
    {"yellow": "green", "three": "four", "right of": "left of", "below": "above"}
)
"""Words of prompts that the base mostly takes for others when it plans."""
MISREAD_FRACTION = 0.7
"""How often it does."""
SLIP_FRACTION = 0.32
"""Share of the base's images that are wrong for their plan in one respect."""


def plan_of(layout: Layout) -> str:
    """What a layout shows, in words; quadrants in order."""
    items = [f"{item} {place}" for item, place in zip(layout, PLACES, strict=True) if item is not None]
    return f"{NUMBERS[len(items) - 1]} thing{'s' if len(items) > 1 else ''}: {', '.join(items)}"


def layout_of(plan: str) -> Layout | None:
    """The layout that a plan describes; None for a text that is no plan."""
    _, separator, items = plan.strip().partition(": ")
    if not separator:
        return None
    found: dict[str, ShapeObject] = {}
    for item in items.split(", "):
        color, shape, *place = [*item.split(" ", 2), "", ""][:3]
        if color not in COLORS or shape not in SHAPES or place[0] not in PLACES:
            return None
        found[place[0]] = ShapeObject(color, shape)
    first, second, third, fourth = (found.get(place) for place in PLACES)
    layout: Layout = (first, second, third, fourth)
    return layout if plan.strip() == plan_of(layout) else None


def is_right(plan: str, spec: PromptSpec) -> bool:
    """True if what a plan describes is what `spec` asks for."""
    return layout_of(plan) in layouts_for(spec)


def planned(spec: PromptSpec, rng: np.random.Generator) -> Layout:
    """What the base plans for a request: every word of MISREAD in it is misread with MISREAD_FRACTION."""

    def read(word: str) -> str:
        return MISREAD[word] if word in MISREAD and rng.random() < MISREAD_FRACTION else word

    if spec.category == "count":
        item = replace(spec.objects[0], color=read(spec.objects[0].color))
        number = NUMBERS.index(read(NUMBERS[len(spec.objects) - 1])) + 1
        return _draw(layouts_for(PromptSpec("count", (item,) * number)), rng)
    objects = tuple(replace(item, color=read(item.color)) for item in spec.objects)
    relation = None if spec.relation is None else read(spec.relation)
    return _draw(layouts_for(PromptSpec(spec.category, objects, relation)), rng)


def drawn(plan: Layout, rng: np.random.Generator) -> Layout:
    """What the base draws of a plan: with SLIP_FRACTION another colour or shape, an object more, fewer or elsewhere.

    Every result is one of `unirl.worlds.shapes.world.all_layouts`.
    """
    if rng.random() >= SLIP_FRACTION:
        return plan
    places = [place for place, item in enumerate(plan) if item is not None]
    free = [place for place, item in enumerate(plan) if item is None]
    place = places[int(rng.integers(len(places)))]
    item = plan[place]
    assert item is not None  # noqa: S101 - of `places`
    if len(places) > 2:
        # Three or four alike stay alike, so that the bank of drawings holds them.
        if free and rng.random() < 0.5:
            return _changed(plan, {free[0]: item})
        return _changed(plan, {place: None})
    kind = int(rng.integers(4))
    if kind == 0:
        return _changed(plan, {place: replace(item, color=_other(COLORS, item.color, rng))})
    if kind == 1:
        return _changed(plan, {place: replace(item, shape=_other(SHAPES, item.shape, rng))})
    elsewhere = free[int(rng.integers(len(free)))]
    if kind == 2:
        return _changed(plan, {place: None, elsewhere: item})
    return _changed(plan, {place: None} if len(places) == 2 else {elsewhere: item})


def _changed(layout: Layout, changes: Mapping[int, ShapeObject | None]) -> Layout:
    first, second, third, fourth = (changes.get(place, item) for place, item in enumerate(layout))
    return first, second, third, fourth


def _other(words: Sequence[str], word: str, rng: np.random.Generator) -> str:
    others = [each for each in words if each != word]
    return others[int(rng.integers(len(others)))]


def _draw(options: Sequence[Layout], rng: np.random.Generator) -> Layout:
    return options[int(rng.integers(len(options)))]
