"""The moves world: every prompt, the scenes that fit it, scenes that nearly fit it, and how a scene is drawn.

A scene says what is in each of the four quadrants of a 32 x 32 video and how it moves there. Size and place jitter come
on top when a scene is drawn. The grammar of prompts is the verifier's; the palette and the shapes are those of the
shapes world. `python -m unirl.worlds.moves.world --out DIR` writes the prompt files.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from unirl.pretraining.prompt_files import split_keys, write_from_command_line, write_split
from unirl.reward.worlds.moves_grammar import (
    CATEGORIES,
    COLORS,
    DIRECTIONS,
    MOTIONS,
    MovesSpec,
    MovingObject,
    parse_prompt,
    prompt_of,
)
from unirl.reward.worlds.shapes_grammar import PALETTE, SHAPES, ShapeObject
from unirl.worlds.shapes.world import IMAGE_SIDE, QUADRANTS, coverage

NUM_FRAMES = 5
"""4k + 1, as the autoencoder wants it: two latent frames."""
TRAVEL = 6.5
"""Pixels from the first frame to the last, at constant speed, centred in the quadrant."""
OBJECTS: tuple[ShapeObject, ...] = tuple(ShapeObject(color, shape) for color in COLORS for shape in SHAPES)
HELDOUT_FRACTION = 0.25
PAIR_FRACTION = 1 / 18
"""Share of the pairs that the files for RL keep; with all of them 29 rows in 30 would be pairs."""
NEAR_MISS_FRACTION = 0.35
"""Share of the pretraining videos that are wrong for their caption in one respect."""

Scene = tuple[MovingObject | None, MovingObject | None, MovingObject | None, MovingObject | None]

_CENTER_JITTER = 1.5
_RADIUS_RANGE = (4.6, 5.0)


def all_specs() -> list[MovesSpec]:
    """Every request in a fixed order: 45 of one object, then 1350 of two, both orders of a pair."""
    moving = [MovingObject(item, motion) for item in OBJECTS for motion in MOTIONS]
    singles = [MovesSpec((each,)) for each in moving]
    pairs = [MovesSpec(pair) for pair in itertools.permutations(moving, 2) if pair[0].item.color != pair[1].item.color]
    return singles + pairs


def all_prompts() -> list[str]:
    """The prompts of `all_specs`."""
    return [prompt_of(spec) for spec in all_specs()]


def scene_key(spec: MovesSpec) -> str:
    """Names what the video must show; the two orders of a pair share a key."""
    return ", ".join(map(str, sorted(spec.objects)))


def split_prompts() -> tuple[list[str], list[str]]:
    """Training and held-out prompts for RL; a quarter of the requests of each category is held out.

    The split is by `scene_key`, in the order of its hash, so no held-out request appears in training in the other
    order. Of the pairs each side keeps PAIR_FRACTION. Pretraining sees `all_prompts`.
    """
    keys = {category: {scene_key(spec) for spec in all_specs() if spec.category == category} for category in CATEGORIES}
    train, heldout = split_keys(keys, heldout_fraction=HELDOUT_FRACTION, kept={"pair": PAIR_FRACTION})
    by_key = [(scene_key(spec), prompt_of(spec)) for spec in all_specs()]
    return [prompt for key, prompt in by_key if key in train], [prompt for key, prompt in by_key if key in heldout]


def write_prompts(folder: Path) -> None:
    """Write `train.jsonl` and `heldout.jsonl`: rows of prompt, prompt_id and metadata.category."""
    write_split(folder, "moves", split_prompts(), lambda prompt: parse_prompt(prompt).category)


def scenes_for(spec: MovesSpec) -> list[Scene]:
    """Every scene that shows exactly what `spec` asks for: 4 of one object, 12 of two."""
    return [
        scene_of(dict(zip(places, spec.objects, strict=True)))
        for places in itertools.permutations(range(4), len(spec.objects))
    ]


def scene_of(contents: Mapping[int, MovingObject]) -> Scene:
    """The scene with these objects in these quadrants, by index into QUADRANTS."""
    return (contents.get(0), contents.get(1), contents.get(2), contents.get(3))


def near_miss(spec: MovesSpec, rng: np.random.Generator) -> Scene:
    """A scene that is wrong for `spec` in one respect: a motion (half of them), a colour, a shape, or the number.

    Of a pair also the binding: the two objects with their motions swapped.
    """
    index = int(rng.integers(len(spec.objects)))
    wrong = spec.objects[index]
    fault = rng.random()
    if fault < 0.5:
        other = spec.objects[1 - index].motion if len(spec.objects) == 2 else wrong.motion
        if other != wrong.motion and rng.random() < 0.4:
            return _draw(scenes_for(MovesSpec(_swapped_motions(spec.objects))), rng)
        wrong = replace(wrong, motion=_other(MOTIONS, [wrong.motion], rng))
    elif fault < 0.7:
        taken = [each.item.color for each in spec.objects]
        wrong = replace(wrong, item=replace(wrong.item, color=_other(COLORS, taken, rng)))
    elif fault < 0.9:
        wrong = replace(wrong, item=replace(wrong.item, shape=_other(SHAPES, [wrong.item.shape], rng)))
    elif len(spec.objects) == 2:
        return _draw(scenes_for(MovesSpec((wrong,))), rng)
    else:
        color = _other(COLORS, [wrong.item.color], rng)
        item = ShapeObject(color, SHAPES[rng.integers(len(SHAPES))])
        extra = MovingObject(item, MOTIONS[rng.integers(len(MOTIONS))])
        return _draw(scenes_for(MovesSpec((wrong, extra))), rng)
    objects = tuple(wrong if place == index else each for place, each in enumerate(spec.objects))
    return _draw(scenes_for(MovesSpec(objects)), rng)


def sample_scene(spec: MovesSpec, rng: np.random.Generator, near_miss_fraction: float) -> Scene:
    """A scene for the caption `spec`, wrong in one respect with probability `near_miss_fraction`."""
    if rng.random() < near_miss_fraction:
        return near_miss(spec, rng)
    return _draw(scenes_for(spec), rng)


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene with jittered places and sizes; uint8 [NUM_FRAMES, 3, 32, 32], black background, antialiased.

    The jitter is across the motion and, for what stays, along both axes.
    """
    video = np.zeros((NUM_FRAMES, 3, IMAGE_SIDE, IMAGE_SIDE))
    for quadrant, moving in zip(QUADRANTS, scene, strict=True):
        if moving is None:
            continue
        direction = np.array(DIRECTIONS[moving.motion])
        middle = (np.array(quadrant) + 0.5) * IMAGE_SIDE / 2
        middle += rng.uniform(-_CENTER_JITTER, _CENTER_JITTER, 2) * (direction == 0)
        radius = rng.uniform(*_RADIUS_RANGE)
        color = np.array(PALETTE[moving.item.color])[:, None, None]
        for frame, progress in enumerate(np.linspace(-0.5, 0.5, NUM_FRAMES)):
            video[frame] += coverage(moving.item.shape, middle + progress * TRAVEL * direction, radius) * color
    return np.round(np.clip(video, 0, 1) * 255).astype(np.uint8)


def _swapped_motions(objects: Sequence[MovingObject]) -> tuple[MovingObject, ...]:
    first, second = objects
    return replace(first, motion=second.motion), replace(second, motion=first.motion)


def _other(options: Sequence[str], taken: Sequence[str], rng: np.random.Generator) -> str:
    rest = [option for option in options if option not in taken]
    return rest[rng.integers(len(rest))]


def _draw(options: Sequence[Scene], rng: np.random.Generator) -> Scene:
    return options[int(rng.integers(len(options)))]


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
