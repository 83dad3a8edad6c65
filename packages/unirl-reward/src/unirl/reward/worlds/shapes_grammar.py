"""The language of the shapes world: five families of prompts over four colours and three shapes.

single    a red circle
color     a red circle and a blue circle          (one shape, two colours)
two       a red circle and a green square         (two shapes, two colours)
count     three blue squares                      (one to four)
position  a blue square left of a green triangle  (left of, right of, above, below)

Both the generator of data and the verifier read prompts here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

PALETTE: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "red": (0.95, 0.15, 0.15),
        "green": (0.15, 0.80, 0.20),
        "blue": (0.20, 0.35, 1.00),
        "yellow": (1.00, 0.90, 0.15),
    }
)
"""RGB in [0, 1] of each colour word; the background is black."""
COLORS: tuple[str, ...] = tuple(PALETTE)
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
NUMBERS: tuple[str, ...] = ("one", "two", "three", "four")
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
CATEGORIES: tuple[str, ...] = ("single", "color", "two", "count", "position")

EXAMPLES = (
    "'a red circle', 'three blue squares', 'a red circle and a green square', 'a blue square left of a green triangle'"
)


@dataclass(frozen=True, order=True)
class ShapeObject:
    """One object that a prompt asks for."""

    color: str
    shape: str

    def __str__(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class PromptSpec:
    """What a prompt asks for: exactly these objects, and for `position` their relation."""

    category: str
    objects: tuple[ShapeObject, ...]
    relation: str | None = None
    """One of RELATIONS; `objects[0]` is `relation` `objects[1]`."""


def prompt_of(spec: PromptSpec) -> str:
    """The sentence for `spec`; `parse_prompt` inverts it."""
    first = spec.objects[0]
    if spec.category == "single":
        return f"a {first}"
    if spec.category == "count":
        return f"{NUMBERS[len(spec.objects) - 1]} {first}{'s' if len(spec.objects) > 1 else ''}"
    link = "and" if spec.relation is None else spec.relation
    return f"a {first} {link} a {spec.objects[1]}"


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> PromptSpec:
    """Read a prompt. Raises ValueError naming the prompt and the sentences that are understood."""
    words = prompt.split()
    spec = _parse_count(words) or _parse_named(words)
    if spec is None:
        raise ValueError(
            f"prompt {prompt!r} is not a sentence of the shapes world; colours: {', '.join(COLORS)}; "
            f"shapes: {', '.join(SHAPES)}; two objects must differ in colour; examples: {EXAMPLES}"
        )
    return spec


def _object(words: list[str]) -> ShapeObject | None:
    if len(words) == 2 and words[0] in COLORS and words[1] in SHAPES:
        return ShapeObject(words[0], words[1])
    return None


def _parse_count(words: list[str]) -> PromptSpec | None:
    if len(words) != 3 or words[0] not in NUMBERS:
        return None
    number = NUMBERS.index(words[0]) + 1
    if number > 1 and not words[2].endswith("s"):
        return None
    found = _object([words[1], words[2][:-1] if number > 1 else words[2]])
    return None if found is None else PromptSpec("count", (found,) * number)


def _parse_named(words: list[str]) -> PromptSpec | None:
    if len(words) < 3 or words[0] != "a":
        return None
    first = _object(words[1:3])
    if first is None:
        return None
    if len(words) == 3:
        return PromptSpec("single", (first,))
    second = _object(words[-2:])
    link = " ".join(words[3:-3])
    if second is None or words[-3] != "a" or first.color == second.color:
        return None
    if link == "and":
        return PromptSpec("color" if first.shape == second.shape else "two", (first, second))
    return PromptSpec("position", (first, second), link) if link in RELATIONS else None
