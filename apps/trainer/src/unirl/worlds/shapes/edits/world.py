"""The edits world: images of two or three shapes, instructions, right results and results of a careless editor.

`python -m unirl.worlds.shapes.edits.world --out DIR` writes the prompt files and a sheet of the images next to each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from unirl.pretraining.prompt_files import write_from_command_line, write_rows
from unirl.reward.worlds.edits import score_edits
from unirl.reward.worlds.edits_grammar import CATEGORIES, DIRECTIONS, Edit, all_edits, prompt_of
from unirl.reward.worlds.shapes_grammar import COLORS, PALETTE, SHAPES, ShapeObject
from unirl.worlds.shapes.sheet import coarse, tile_uri, write_sheet
from unirl.worlds.shapes.world import IMAGE_SIDE, QUADRANTS, coverage

NEAR_MISS_FRACTION: Mapping[str, float] = MappingProxyType({"color": 0.5, "shape": 0.5, "remove": 0.5, "move": 0.5})
"""Share of the pretraining results of each category that are wrong in one respect."""
HELDOUT_FRACTION = 0.1
"""Fraction of all arrangements of objects; neither the base nor RL has seen these."""
FOLDER = Path(__file__).parent
NUM_TRAIN = 1280
NUM_HELDOUT = 256
SHEET_COLUMNS = 40

_CENTER_JITTER = 1.5
_RADIUS_RANGE = (4.8, 6.2)
_THREE_FRACTION = 0.6
"""Share of the images with three objects; the others have two."""


@dataclass(frozen=True)
class Placed:
    """An object where it stands."""

    item: ShapeObject
    quadrant: int
    offset_yx: tuple[float, float]
    """Offset of its centre from that of the quadrant, pixels."""
    radius: float
    """Half its height, pixels."""


Scene = tuple[Placed, ...]


def draw_scene(rng: np.random.Generator, *, heldout: bool) -> Scene:
    """Two or three objects of different shapes in different quadrants, from one side of the split."""
    while True:
        number = 3 if rng.random() < _THREE_FRACTION else 2
        shapes, places = rng.permutation(len(SHAPES))[:number], rng.permutation(4)[:number]
        scene = tuple(
            Placed(
                ShapeObject(COLORS[rng.integers(len(COLORS))], SHAPES[shape]),
                int(place),
                (
                    float(rng.uniform(-_CENTER_JITTER, _CENTER_JITTER)),
                    float(rng.uniform(-_CENTER_JITTER, _CENTER_JITTER)),
                ),
                float(rng.uniform(*_RADIUS_RANGE)),
            )
            for shape, place in zip(shapes, places, strict=True)
        )
        if is_heldout(scene) == heldout:
            return scene


def is_heldout(scene: Scene) -> bool:
    """True if an image is kept from pretraining and RL: by the hash of what stands where."""
    contents = sorted((each.quadrant, str(each.item)) for each in scene)
    digest = hashlib.sha256(repr(contents).encode()).digest()
    return int.from_bytes(digest[:4]) < HELDOUT_FRACTION * 2**32


def applied(scene: Scene, edit: Edit) -> Scene | None:
    """The scene after the edit; None where it cannot be asked for: no such object, no change, no free place."""
    subject = next((each for each in scene if each.item.shape == edit.subject), None)
    if subject is None:
        return None
    changed: Placed | None = None
    if edit.category == "color":
        changed = replace(subject, item=replace(subject.item, color=edit.value))
    elif edit.category == "shape":
        changed = replace(subject, item=replace(subject.item, shape=edit.value))
    elif edit.category == "move":
        place = _neighbour(subject.quadrant, edit.value)
        if place is None or any(each.quadrant == place for each in scene):
            return None
        changed = replace(subject, quadrant=place)
    if changed == subject:
        return None
    after = [changed if each is subject else each for each in scene]
    return tuple(each for each in after if each is not None)


def possible_edits(scene: Scene) -> dict[str, list[Edit]]:
    """What can be asked for, by category."""
    found = [edit for edit in all_edits() if applied(scene, edit) is not None]
    return {category: [e for e in found if e.category == category] for category in CATEGORIES}


def near_miss(scene: Scene, edit: Edit, rng: np.random.Generator) -> Scene:
    """What a careless editor makes of it: wrong in one respect. It changes another object, changes the right one in the
    wrong way, changes something else besides, or nothing."""
    right = applied(scene, edit)
    assert right is not None  # noqa: S101 - callers ask for what is possible
    options = possible_edits(scene)
    others = [each.item.shape for each in scene if each.item.shape != edit.subject]
    elsewhere = [e for e in options[edit.category] if e.subject in others and e.value in ("", edit.value)]
    elsewhere = elsewhere or [e for e in options[edit.category] if e.subject in others]
    otherwise = [e for e in options[edit.category] if e.subject == edit.subject and e != edit]
    otherwise = otherwise or [e for e in options["color"] if e.subject == edit.subject]
    kind = rng.choice(4, p=[0.35, 0.35, 0.2, 0.1])
    if kind == 0 and elsewhere:
        wrong = applied(scene, elsewhere[rng.integers(len(elsewhere))])
    elif kind == 2:
        # Another object that still has its shape changes its colour too.
        besides = [Edit("color", other, color) for other in others for color in COLORS]
        bystanders = tuple(each for each in right if each.item.shape in others and each in scene)
        both = [(e, applied(bystanders, e)) for e in besides]
        both = [(e, after) for e, after in both if after is not None]
        _, after = both[rng.integers(len(both))]
        wrong = (*(each for each in right if each not in bystanders), *after)
    elif kind == 3:
        wrong = scene
    else:
        wrong = applied(scene, otherwise[rng.integers(len(otherwise))])
    assert wrong is not None  # noqa: S101 - all come from `possible_edits`
    return wrong


def render(scene: Scene) -> np.ndarray:
    """Draw a scene; uint8 [3, 32, 32], black background, antialiased, in the values that a sheet keeps."""
    picture = np.zeros((3, IMAGE_SIDE, IMAGE_SIDE))
    for each in scene:
        center = (np.array(QUADRANTS[each.quadrant]) + 0.5) * IMAGE_SIDE / 2 + np.array(each.offset_yx)
        cover = coverage(each.item.shape, center, each.radius)
        picture += cover * np.array(PALETTE[each.item.color])[:, None, None]
    return coarse(np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8))


def draw_task(category: str, rng: np.random.Generator, *, heldout: bool) -> tuple[Scene, Edit]:
    """A scene and an instruction of this category."""
    while True:
        scene = draw_scene(rng, heldout=heldout)
        edits = possible_edits(scene)[category]
        if edits:
            return scene, edits[rng.integers(len(edits))]


def write_tasks(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl` and a sheet of images next to each, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name, number in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        pictures: list[np.ndarray] = []
        lines: list[Mapping[str, object]] = []
        while len(pictures) < number:
            category = CATEGORIES[len(pictures) % len(CATEGORIES)]
            scene, edit = draw_task(category, rng, heldout=name == "heldout")
            source = render(scene)
            if not is_satisfiable(source, render(_present(applied(scene, edit))), edit):
                continue
            row = len(pictures)
            line = {
                "prompt": prompt_of(edit),
                "prompt_id": f"edits-{name}-{row:04d}",
                "media": [
                    {"modality": "image", "role": "condition", "uri": tile_uri(f"{name}.png", row, SHEET_COLUMNS)}
                ],
                "metadata": {"category": category},
            }
            lines.append(line)
            pictures.append(source)
        write_rows(folder / f"{name}.jsonl", lines)
        write_sheet(folder / f"{name}.png", pictures, SHEET_COLUMNS)


def is_satisfiable(source: np.ndarray, result: np.ndarray, edit: Edit) -> bool:
    """True if the verifier reads the image given, and agrees with the right result; one circle in 500 is misread."""
    try:
        strict, _ = score_edits(torch.from_numpy(result)[None], torch.from_numpy(source)[None], [prompt_of(edit)])
    except ValueError:
        return False
    return bool(strict[0])


def _present(scene: Scene | None) -> Scene:
    assert scene is not None  # noqa: S101 - the edit is possible
    return scene


def _neighbour(quadrant: int, direction: str) -> int | None:
    (row, column), (down, right) = QUADRANTS[quadrant], DIRECTIONS[direction]
    place = (row + down, column + right)
    return QUADRANTS.index(place) if place in QUADRANTS else None


if __name__ == "__main__":
    write_from_command_line(write_tasks, __doc__)
