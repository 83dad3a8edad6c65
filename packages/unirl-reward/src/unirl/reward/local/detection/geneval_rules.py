"""GenEval's rules: from detected objects and what a prompt asks for to right or wrong. Pure functions.

What is asked for is a row of GenEval's metadata: "include", clauses {"class", "count", "color"?, "position"?} that must
all hold, "position" being [relation, index of the clause it refers to]; "exclude", clauses {"class", "count"} of which
none may hold; "tag", the kind of prompt. Boxes are x0, y0, x1, y1 in pixels.
Source: GenEval (arXiv 2310.11513), evaluation/evaluate_images.py; strict and score: Flow-GRPO (arXiv 2505.05470).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unirl.types.errors import ConfigError

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_HALF = 0.5
"""Share of the distance between two centres: a relation holds along an axis that has more than this share of it."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Detection:
    """One object that a detector found. mask: bool [H, W], None where the detector gives boxes only."""

    label: str
    score: float
    box: Box
    mask: Tensor | None = None


ColoursOf = Callable[[Sequence[Detection]], Sequence[str]]
"""The colour of each of some objects of one class."""


@dataclass(frozen=True)
class Verdict:
    """strict: every clause holds with exactly its count. reward: GenEval's own answer, by at least its count and the
    exclusions. Both 0 or 1. score: the mean of partial credits, 1 - |found - count| / count and the like."""

    strict: float
    score: float
    reward: float
    wrong: tuple[str, ...] = field(default=(), compare=False)
    """What GenEval finds wrong, as `why_wrong` says it."""


def kept(
    found: Sequence[Detection], threshold: float, max_objects: int = 16, max_overlap: float = 1.0
) -> dict[str, list[Detection]]:
    """Detections by label, the surest first: above `threshold`, at most `max_objects` a label.

    Of those, one that overlaps a surer one by an IoU of `max_overlap` or more is dropped; 1 keeps all.
    """
    objects: dict[str, list[Detection]] = {}
    for each in sorted(found, key=lambda each: -each.score):
        if each.score > threshold:
            objects.setdefault(each.label, []).append(each)
    for label, candidates in objects.items():
        chosen: list[Detection] = []
        for each in candidates[:max_objects]:
            if max_overlap == 1 or all(iou(each.box, other.box) < max_overlap for other in chosen):
                chosen.append(each)
        objects[label] = chosen
    return objects


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes whose corners are pixels inside them."""

    def area(box: Box) -> float:
        return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)

    common = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - common
    return common / union if union else 0.0


def relations(a: Box, b: Box, threshold: float = 0.1) -> set[str]:
    """Where a lies as seen from b: of RELATIONS those that hold.

    Along each axis the distance of the centres is lessened by `threshold` times the sum of the sizes; what is left, as
    a share of the distance, must exceed a half.
    """
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a, b)]
    offsets = [centres[0][axis] - centres[1][axis] for axis in (0, 1)]
    sizes = [abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis]) for axis in (0, 1)]
    left_over = [max(abs(offset) - threshold * size, 0) for offset, size in zip(offsets, sizes, strict=True)]
    if max(left_over) < 1e-3:
        return set()
    distance = (offsets[0] ** 2 + offsets[1] ** 2) ** 0.5
    found = set()
    for axis, names in ((0, ("left of", "right of")), (1, ("above", "below"))):
        if left_over[axis] / distance > _HALF:
            found.add(names[0] if offsets[axis] < 0 else names[1])
    return found


def judged(
    objects: Mapping[str, Sequence[Detection]],
    row: Mapping[str, Any],  # Any: a checked row of a user's data file
    colours_of: ColoursOf,
    position_threshold: float = 0.1,
) -> Verdict:
    """What GenEval, and Flow-GRPO's two variants of it, say of `objects` (see `kept`) under `row` (see `check_row`).

    In the score a wrong position counts 0; Flow-GRPO's code counts it 0 and 1.
    """
    wrong = why_wrong(objects, row, colours_of, position_threshold)
    is_strict, credits = _credits(objects, row["include"], colours_of, position_threshold)
    return Verdict(
        strict=float(is_strict), score=sum(credits) / len(credits), reward=float(not wrong), wrong=tuple(wrong)
    )


def why_wrong(
    objects: Mapping[str, Sequence[Detection]],
    row: Mapping[str, Any],  # Any: a checked row of a user's data file
    colours_of: ColoursOf,
    threshold: float = 0.1,
) -> list[str]:
    """What GenEval finds wrong, in the words of its results; nothing where it calls the image right.

    The surest `count` objects of each class decide.
    """
    all_wrong: list[str] = []
    groups: list[Sequence[Detection] | None] = []
    for clause in row["include"]:
        name, count = clause["class"], clause["count"]
        found = objects.get(name, [])[:count]
        wrong = [] if len(found) == count else [f"expected {name}>={count}, found {len(found)}"]
        if not wrong and "color" in clause:
            wrong += _wrong_colour(clause, list(colours_of(found)))
        if not wrong and "position" in clause:
            wrong += _wrong_place(found, clause, groups, threshold)
        groups.append(None if wrong else found)
        all_wrong += wrong
    for clause in row.get("exclude", []):
        num = len(objects.get(clause["class"], []))
        if num >= clause["count"]:
            all_wrong.append(f"expected {clause['class']}<{clause['count']}, found {num}")
    return all_wrong


def _wrong_colour(clause: Mapping[str, Any], seen: list[str]) -> list[str]:  # Any: as above
    wanted, count = clause["color"], clause["count"]
    if seen.count(wanted) >= count:
        return []
    others = ", ".join(f"{seen.count(each)} {each}" for each in COLOURS if each in seen)
    return [f"expected {wanted} {clause['class']}>={count}, found {seen.count(wanted)} {wanted}; and {others}"]


def _wrong_place(
    found: Sequence[Detection],
    clause: Mapping[str, Any],  # Any: as above
    groups: Sequence[Sequence[Detection] | None],
    threshold: float,
) -> list[str]:
    name, (relation, target) = clause["class"], clause["position"]
    others = groups[target]
    if others is None:
        return [f"no target for {name} to be {relation}"]
    for each in found:
        for other in others:
            true = relations(each.box, other.box, threshold)
            if relation not in true:
                return [f"expected {name} {relation} target, found {' and '.join(sorted(true))} target"]
    return []


def _credits(
    objects: Mapping[str, Sequence[Detection]], clauses: Sequence[Any], colours_of: ColoursOf, threshold: float
) -> tuple[bool, list[float]]:
    """Returns (every clause holds exactly, partial credit of each count, colour and position)."""
    groups: list[Sequence[Detection] | None] = []
    credits: list[float] = []
    for clause in clauses:
        found, count = objects.get(clause["class"], []), clause["count"]
        credits.append(1 - abs(count - len(found)) / count)
        is_met = len(found) == count
        if not is_met and ("color" in clause or "position" in clause):
            credits.append(0.0)
        if is_met and "color" in clause:
            right = list(colours_of(found)).count(clause["color"])
            credits.append(1 - abs(count - right) / count)
            is_met = right == count
        if is_met and "position" in clause:
            is_met = _is_placed(found, clause["position"], groups, threshold)
            credits.append(float(is_met))
        groups.append(found if is_met else None)
    return None not in groups, credits


def _is_placed(
    found: Sequence[Detection],
    position: tuple[str, int],
    groups: Sequence[Sequence[Detection] | None],
    threshold: float,
) -> bool:
    relation, target = position
    others = groups[target]
    return others is not None and all(
        relation in relations(each.box, other.box, threshold) for each in found for other in others
    )


def check_row(row: Mapping[str, Any] | None, labels: Collection[str], owner: str) -> Mapping[str, Any]:
    """The row, if it is metadata of GenEval and asks for classes in `labels`. Raises ConfigError with what is wrong."""
    if not row or not row.get("include"):
        raise ConfigError(
            f"{owner} has no include clauses. Give its data row GenEval's metadata (include, exclude, tag)."
        )
    for place, clause in enumerate([*row["include"], *row.get("exclude", [])]):
        name, count = clause.get("class"), clause.get("count")
        if name not in labels:
            near = difflib.get_close_matches(str(name), labels, n=3) or sorted(labels)[:5]
            raise ConfigError(
                f"{owner} asks for {name!r}, which the detector does not know. Did you mean one of {near}?"
            )
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{owner} asks for count = {count!r} of {name}; expected a whole number from 1")
        if "color" in clause and clause["color"] not in COLOURS:
            raise ConfigError(f"{owner} asks for the color {clause['color']!r}; it must be one of {COLOURS}")
        if "position" in clause:
            relation, target = clause["position"]
            if relation not in RELATIONS or not 0 <= target < place:
                raise ConfigError(
                    f"{owner}: position = {clause['position']!r} must be one of {RELATIONS} and the index of an "
                    "earlier clause"
                )
    return row
