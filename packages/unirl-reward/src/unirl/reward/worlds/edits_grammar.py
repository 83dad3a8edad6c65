"""The language of the edits world: what to do to one object of an image of shapes, named by its shape.

color   make the square blue
shape   turn the square into a circle
remove  remove the circle
move    move the triangle to the left   (to the left, to the right, up, down: by half the image)

Both the generator of data and the verifier read instructions here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from unirl.reward.worlds.shapes_grammar import COLORS, SHAPES

CATEGORIES: tuple[str, ...] = ("color", "shape", "remove", "move")
DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"to the left": (0, -1), "to the right": (0, 1), "up": (-1, 0), "down": (1, 0)}
)
"""Step (down, right) of each direction."""


@dataclass(frozen=True, order=True)
class Edit:
    """One instruction."""

    category: str
    subject: str
    """The shape of the object that changes."""
    value: str = ""
    """The new colour or shape, or the direction; empty for `remove`."""


def prompt_of(edit: Edit) -> str:
    """The sentence for `edit`; `parse_edit` inverts it."""
    return {
        "color": f"make the {edit.subject} {edit.value}",
        "shape": f"turn the {edit.subject} into a {edit.value}",
        "remove": f"remove the {edit.subject}",
        "move": f"move the {edit.subject} {edit.value}",
    }[edit.category]


def all_edits() -> list[Edit]:
    """Every instruction in a fixed order: 12 color, 6 shape, 3 remove, 12 move."""
    return [
        *(Edit("color", subject, color) for subject in SHAPES for color in COLORS),
        *(Edit("shape", subject, shape) for subject in SHAPES for shape in SHAPES if shape != subject),
        *(Edit("remove", subject) for subject in SHAPES),
        *(Edit("move", subject, direction) for subject in SHAPES for direction in DIRECTIONS),
    ]


@lru_cache(maxsize=1)
def _by_prompt() -> Mapping[str, Edit]:
    return {prompt_of(edit): edit for edit in all_edits()}


def parse_edit(prompt: str) -> Edit:
    """Read an instruction. Raises ValueError naming it and the sentences that are understood."""
    edit = _by_prompt().get(prompt)
    if edit is None:
        examples = ", ".join(
            repr(prompt_of(next(e for e in all_edits() if e.category == category))) for category in CATEGORIES
        )
        raise ValueError(
            f"prompt {prompt!r} is no instruction of the edits world; shapes: {', '.join(SHAPES)}; colours: "
            f"{', '.join(COLORS)}; directions: {', '.join(DIRECTIONS)}; examples: {examples}"
        )
    return edit
