"""The verifier of the edits world: was the instruction carried out on the image, and is all else unchanged?

Objects are found as in the shapes world, in the image that was given and in the one that was made. Those of the
first say what the second must show, where, and how large. Shape letters: B images, H W pixels, K objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unirl.reward.worlds.edits_grammar import DIRECTIONS, Edit, parse_edit
from unirl.reward.worlds.shapes import Objects, as_unit_float, find_objects
from unirl.reward.worlds.shapes_grammar import COLORS, SHAPES

MAX_SHIFT = 0.07
"""How far the centre of what stays where it is may lie from its old place, as a fraction of the side."""
MAX_SHIFT_RESHAPED = 0.12
"""The same for another shape: the centre of a triangle lies lower than that of its bounding box."""
MAX_SHIFT_MOVED = 0.12
"""How far from half the side away a moved object may end, as a fraction of the side."""
NEAR = 0.15
"""What lies closer than this to a place, as a fraction of the side, stands there for partial credit."""
MAX_GROWTH = 1.4
"""Largest ratio of the areas of an object before and after."""
EDIT_WEIGHT = 0.5
"""Share of the edit in the soft score; the rest is for what must stay."""


@dataclass(frozen=True)
class _Object:
    """An object that was found, or one that must be there."""

    color: int
    shape: int
    y: float
    x: float
    area: float
    max_shift: float = 0.0
    """Largest shift of an object that must be there, pixels."""

    def distance(self, other: _Object) -> float:
        return float(np.hypot(self.y - other.y, self.x - other.x))


def score_edits(pixels_BCHW: Tensor, sources_BCHW: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Strict and soft scores of a batch of edited images.

    pixels_BCHW, sources_BCHW: [B, 3, H, W] of one size on any device, float in [0, 1] or uint8: results and givens.
    strict (0 or 1): the result shows the objects of the given image with the edit applied and nothing else: colours
    and shapes, places within MAX_SHIFT and sizes within MAX_GROWTH.
    soft: half the edit (1; 0.5 where an object of the new colour, or of the new shape, is at the right place; else 0),
    half the share of the other objects that are unchanged, divided by 1 + the number of objects that are neither. It is
    1 exactly when strict is.
    Returns strict_B, soft_B: float32 on the CPU.
    Raises ValueError for a prompt outside the grammar, a given image without exactly one object of the shape that the
    prompt names, and sizes or numbers that disagree.
    """
    if pixels_BCHW.shape != sources_BCHW.shape or pixels_BCHW.ndim != 4 or len(prompts) != len(pixels_BCHW):
        raise ValueError(
            f"expected images and givens [B, 3, H, W] and B prompts, got {tuple(pixels_BCHW.shape)}, "
            f"{tuple(sources_BCHW.shape)}, {len(prompts)} prompts"
        )
    edits = [parse_edit(prompt) for prompt in prompts]
    if not edits:
        return torch.zeros(0), torch.zeros(0)
    num_images, side = len(edits), pixels_BCHW.shape[-1]
    both = np.concatenate([as_unit_float(sources_BCHW), as_unit_float(pixels_BCHW)])
    objects = _by_image(find_objects(both), 2 * num_images)
    soft_B = [
        _soft(*_expected(before, edit, side), after, side)
        for before, after, edit in zip(objects[:num_images], objects[num_images:], edits, strict=True)
    ]
    strict_B = [soft == 1.0 for soft in soft_B]
    return torch.tensor(strict_B, dtype=torch.float32), torch.tensor(soft_B, dtype=torch.float32)


def _by_image(objects: Objects, num_images: int) -> list[list[_Object]]:
    found: list[list[_Object]] = [[] for _ in range(num_images)]
    for image, color, shape, center, area in zip(
        objects.image_K, objects.color_K, objects.shape_K, objects.center_K2, objects.area_K, strict=True
    ):
        found[image].append(_Object(int(color), int(shape), float(center[0]), float(center[1]), float(area)))
    return found


def _expected(before: list[_Object], edit: Edit, side: int) -> tuple[_Object | None, list[_Object], _Object]:
    """The edited object as it must be (None: gone), the others, and the edited object as it was."""
    subjects = [item for item in before if item.shape == SHAPES.index(edit.subject)]
    if len(subjects) != 1:
        raise ValueError(
            f"the image given with {edit} shows {len(subjects)} objects of the shape {edit.subject}, it must show one"
        )
    subject = subjects[0]
    others = [replace(item, max_shift=MAX_SHIFT * side) for item in before if item is not subject]
    if edit.category == "remove":
        return None, others, subject
    if edit.category == "color":
        return replace(subject, color=COLORS.index(edit.value), max_shift=MAX_SHIFT * side), others, subject
    if edit.category == "shape":
        # Its area follows from the shape, so any will do.
        changed = replace(subject, shape=SHAPES.index(edit.value), max_shift=MAX_SHIFT_RESHAPED * side, area=0.0)
        return changed, others, subject
    down, right = DIRECTIONS[edit.value]
    place = {"y": subject.y + down * side / 2, "x": subject.x + right * side / 2}
    return replace(subject, **place, max_shift=MAX_SHIFT_MOVED * side), others, subject


def _soft(wanted: _Object | None, others: list[_Object], subject: _Object, after: list[_Object], side: int) -> float:
    rest = list(after)
    kept = 0
    for item in others:
        match = next((found for found in rest if _is_same(found, item)), None)
        if match is not None:
            rest.remove(match)
            kept += 1
    if wanted is None:
        done = float(all(found.distance(subject) > NEAR * side for found in rest))
    else:
        exact = next((found for found in rest if _is_same(found, wanted)), None)
        near = next(
            (found for found in rest if found.distance(wanted) <= NEAR * side and _is_partly(found, wanted, subject)),
            None,
        )
        match = exact or near
        done = 0.0 if match is None else 1.0 if exact else 0.5
        if match is not None:
            rest.remove(match)
    unchanged = kept / len(others) if others else 1.0
    return (EDIT_WEIGHT * done + (1 - EDIT_WEIGHT) * unchanged) / (1 + len(rest))


def _is_same(found: _Object, wanted: _Object) -> bool:
    """Colour, shape, place and size agree."""
    is_sized = wanted.area == 0 or max(found.area, wanted.area) <= MAX_GROWTH * min(found.area, wanted.area)
    is_there = found.distance(wanted) <= wanted.max_shift
    return (found.color, found.shape) == (wanted.color, wanted.shape) and is_there and is_sized


def _is_partly(found: _Object, wanted: _Object, subject: _Object) -> bool:
    """The new colour or the new shape; after a move, either."""
    if wanted.color != subject.color:
        return found.color == wanted.color
    if wanted.shape != subject.shape:
        return found.shape == wanted.shape
    return found.color == wanted.color or found.shape == wanted.shape
