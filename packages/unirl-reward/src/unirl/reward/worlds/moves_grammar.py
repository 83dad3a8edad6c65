"""The language of the moves world: one or two objects, and how each of them moves.

single  a red circle moves left
pair    a red circle moves left, a blue square stays  (two colours)

Both the generator of data and the verifier read prompts here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from unirl.reward.worlds.shapes_grammar import SHAPES, ShapeObject

COLORS: tuple[str, ...] = ("red", "green", "blue")
"""Colours of the palette of the shapes world."""
DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"moves left": (0, -1), "moves right": (0, 1), "moves up": (-1, 0), "moves down": (1, 0), "stays": (0, 0)}
)
"""Unit step (y, x) of each motion in pixel coordinates: y points down."""
MOTIONS: tuple[str, ...] = tuple(DIRECTIONS)
CATEGORIES: tuple[str, ...] = ("single", "pair")

EXAMPLES = "'a red circle moves left', 'a green triangle stays', 'a red circle moves up, a blue square stays'"


@dataclass(frozen=True, order=True)
class MovingObject:
    """An object and what it does."""

    item: ShapeObject
    motion: str
    """One of MOTIONS."""

    def __str__(self) -> str:
        return f"{self.item} {self.motion}"


@dataclass(frozen=True)
class MovesSpec:
    """What a prompt asks for: exactly these objects, each moving as it says through the whole video."""

    objects: tuple[MovingObject, ...]
    """One or two, of different colours."""

    @property
    def category(self) -> str:
        """ "single" or "pair"."""
        return CATEGORIES[len(self.objects) - 1]


def prompt_of(spec: MovesSpec) -> str:
    """The sentence for `spec`; `parse_prompt` inverts it."""
    return ", ".join(f"a {each}" for each in spec.objects)


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> MovesSpec:
    """Read a prompt. Raises ValueError naming the prompt and the sentences that are understood."""
    objects = [_moving_object(part) for part in prompt.split(", ")]
    found = tuple(each for each in objects if each is not None)
    if len(found) != len(objects) or len(found) > 2 or len({each.item.color for each in found}) != len(found):
        raise ValueError(
            f"prompt {prompt!r} is not a sentence of the moves world; colours: {', '.join(COLORS)}; "
            f"shapes: {', '.join(SHAPES)}; motions: {', '.join(MOTIONS)}; two objects must differ in colour; "
            f"examples: {EXAMPLES}"
        )
    return MovesSpec(found)


def _moving_object(phrase: str) -> MovingObject | None:
    article, _, rest = phrase.partition(" ")
    color, _, rest = rest.partition(" ")
    shape, _, motion = rest.partition(" ")
    if article != "a" or color not in COLORS or shape not in SHAPES or motion not in MOTIONS:
        return None
    return MovingObject(ShapeObject(color, shape), motion)
