"""Drawn people with videos of how they are to move, for models that animate a character. Generated.

A pose video shows a skeleton in the colours of OpenPose, a face video a face alone, and the image the person at
rest, with the same proportions. Angles are in degrees: 0 hangs down, 90 points outwards, 180 up. Lengths are in heights
of the image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from PIL import Image, ImageDraw

from unirl.datasets.captioned import encoded
from unirl.datasets.records import IMAGE, Medium, Picture, PromptSet, Row, generated
from unirl.datasets.splitting import drawn, is_held_out

WIDTH, HEIGHT = 832, 480
FACE_SIDE = 256
NUM_FRAMES = 33
"""As the recipe samples them."""
HELD_OUT = 0.15
"""Fraction of the pairs of a person and a motion."""

Point = tuple[float, float]
Colour = tuple[int, int, int]

BLACK: Colour = (0, 0, 0)
GROUND = 0.92
TORSO, NECK_TO_NOSE = 0.23, 0.11
SHOULDER, HIP = 0.075, 0.045
"""Half of each width."""
UPPER_ARM, FOREARM, THIGH, SHIN = 0.13, 0.12, 0.17, 0.17
HEAD_RADIUS = 0.07


@dataclass(frozen=True)
class Swing:
    """An angle that goes there and back."""

    mean: float
    reach: float = 0.0
    cycles: int = 1
    """In the length of the video."""

    def at(self, time: float) -> float:
        """The angle at a time in [0, 1)."""
        return self.mean - self.reach * math.cos(2 * math.pi * self.cycles * time)


REST: Mapping[str, Swing] = {
    "lean": Swing(0),
    "right upper arm": Swing(12),
    "right forearm": Swing(8),
    "left upper arm": Swing(12),
    "left forearm": Swing(8),
    "right thigh": Swing(6),
    "right shin": Swing(4),
    "left thigh": Swing(6),
    "left shin": Swing(4),
}


def _both(part: str, swing: Swing) -> dict[str, Swing]:
    return {f"{side} {part}": swing for side in ("right", "left")}


MOTIONS: Mapping[str, Mapping[str, Swing]] = {
    "waves with the right hand": {"right upper arm": Swing(115), "right forearm": Swing(170, 30, 3)},
    "waves with the left hand": {"left upper arm": Swing(115), "left forearm": Swing(170, 30, 3)},
    "raises both arms and lowers them": {
        **_both("upper arm", Swing(92, 80)),
        **_both("forearm", Swing(90, 82)),
    },
    "does jumping jacks": {
        **_both("upper arm", Swing(92, 80, 3)),
        **_both("forearm", Swing(96, 84, 3)),
        **_both("thigh", Swing(18, 12, 3)),
        **_both("shin", Swing(18, 12, 3)),
    },
    "squats": {
        **_both("thigh", Swing(36, 30, 2)),
        **_both("shin", Swing(-5, -9, 2)),
        **_both("upper arm", Swing(60, 45, 2)),
        **_both("forearm", Swing(60, 50, 2)),
    },
    "sways from side to side": {"lean": Swing(0, 16, 2)},
    "kicks with the left leg": {"left thigh": Swing(36, 30, 2), "left shin": Swing(30, 26, 2)},
    "claps": {**_both("upper arm", Swing(48, 12, 4)), **_both("forearm", Swing(-62, 30, 4))},
}
EXPRESSIONS = ("smiles", "talks", "blinks", "looks surprised")

LIMBS: tuple[tuple[str, str, Colour], ...] = (
    ("neck", "right shoulder", (255, 0, 0)),
    ("neck", "left shoulder", (255, 85, 0)),
    ("right shoulder", "right elbow", (255, 170, 0)),
    ("right elbow", "right wrist", (255, 255, 0)),
    ("left shoulder", "left elbow", (170, 255, 0)),
    ("left elbow", "left wrist", (85, 255, 0)),
    ("neck", "right hip", (0, 255, 0)),
    ("right hip", "right knee", (0, 255, 85)),
    ("right knee", "right ankle", (0, 255, 170)),
    ("neck", "left hip", (0, 255, 255)),
    ("left hip", "left knee", (0, 170, 255)),
    ("left knee", "left ankle", (0, 85, 255)),
    ("neck", "nose", (0, 0, 255)),
)


def joints(angles: Mapping[str, float]) -> dict[str, Point]:
    """Where the joints are, (x, y) in heights of the image, from the angles of REST's names.

    The lower ankle stands on the ground. The right side of a person who looks at us is on the left of the image.
    """
    lean = math.radians(angles["lean"])
    up, across = (math.sin(lean), -math.cos(lean)), (math.cos(lean), math.sin(lean))
    found = {"hips": (WIDTH / HEIGHT / 2, 0.0)}
    found["neck"] = _moved(found["hips"], up, TORSO)
    found["nose"] = _moved(found["neck"], up, NECK_TO_NOSE)
    for side, sign in (("right", -1), ("left", 1)):
        found[f"{side} shoulder"] = _moved(found["neck"], across, sign * SHOULDER)
        found[f"{side} hip"] = _moved(found["hips"], (1, 0), sign * HIP)
        chain = (("shoulder", "upper arm", "elbow", UPPER_ARM), ("elbow", "forearm", "wrist", FOREARM)) + (
            ("hip", "thigh", "knee", THIGH),
            ("knee", "shin", "ankle", SHIN),
        )
        for begin, part, end, length in chain:
            angle = math.radians(angles[f"{side} {part}"])
            found[f"{side} {end}"] = _moved(found[f"{side} {begin}"], (sign * math.sin(angle), math.cos(angle)), length)
    lift = GROUND - max(found["right ankle"][1], found["left ankle"][1])
    return {name: (x, y + lift) for name, (x, y) in found.items()}


def _moved(point: Point, direction: Point, length: float) -> Point:
    return point[0] + length * direction[0], point[1] + length * direction[1]


@cache
def pose_video(motion: str) -> tuple[Picture, ...]:
    """NUM_FRAMES of a skeleton, coloured on black."""
    swings = {**REST, **MOTIONS[motion]}
    return tuple(
        _skeleton({name: swing.at(frame / NUM_FRAMES) for name, swing in swings.items()}) for frame in range(NUM_FRAMES)
    )


def _skeleton(angles: Mapping[str, float]) -> Picture:
    canvas = Image.new("P", (WIDTH, HEIGHT))  # which is written three times as fast as one in RGB
    canvas.putpalette([channel for colour in (BLACK, *(limb[2] for limb in LIMBS)) for channel in colour])
    draw, at = ImageDraw.Draw(canvas), _in_pixels(joints(angles), HEIGHT)
    for number, (begin, end, _) in enumerate(LIMBS, start=1):
        draw.line((at[begin], at[end]), fill=number, width=6)
        _dot(draw, at[end], 5, number)
    _dot(draw, at["neck"], 5, 1)
    return encoded(canvas, "PNG")


def _in_pixels(points: Mapping[str, Point], height: int) -> dict[str, Point]:
    return {name: (x * height, y * height) for name, (x, y) in points.items()}


def _dot(draw: ImageDraw.ImageDraw, centre: Point, radius: float, colour: Colour | int) -> None:
    x, y = centre
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


# People -------------------------------------------------------------------------------------------------------------

HAIR = {"black": (35, 30, 30), "brown": (105, 65, 35), "blond": (225, 190, 110), "red": (180, 75, 35)}
CLOTHES = {
    "red": (200, 45, 45),
    "blue": (50, 90, 190),
    "green": (50, 140, 75),
    "yellow": (230, 195, 60),
    "white": (240, 240, 235),
    "grey": (120, 120, 125),
}
SKIN: tuple[Colour, ...] = ((245, 210, 180), (205, 155, 115), (120, 80, 55))
WALLS: tuple[Colour, ...] = ((205, 220, 230), (230, 220, 200), (210, 225, 205))
FLOOR: Colour = (150, 135, 120)
DARK: Colour = (40, 35, 35)
LIPS: Colour = (150, 60, 60)


@dataclass(frozen=True)
class Person:
    """What a person looks like."""

    is_woman: bool
    hair: str
    shirt: str
    trousers: str
    skin: Colour = field(default=SKIN[0])
    wall: Colour = field(default=WALLS[0])

    @property
    def words(self) -> str:
        """In a prompt."""
        who, length = ("woman", "long") if self.is_woman else ("man", "short")
        return f"a {who} with {length} {self.hair} hair, in a {self.shirt} shirt and {self.trousers} trousers,"


def people() -> Iterator[Person]:
    """One of each sex, hair and some shirt; what else they have goes by hash."""
    for is_woman, hair, number in itertools.product((False, True), HAIR, range(3)):
        key = f"character {is_woman} {hair} {number}"
        shirt = drawn(tuple(CLOTHES)[2 * number : 2 * number + 2], f"{key} shirt")
        others = tuple(colour for colour in CLOTHES if colour != shirt)
        yield Person(
            is_woman,
            hair,
            shirt,
            drawn(others, f"{key} trousers"),
            drawn(SKIN, f"{key} skin"),
            drawn(WALLS, f"{key} wall"),
        )


@cache
def portrait(person: Person) -> Picture:
    """The person at rest, in front of a wall. Drawn twice as large, so that edges are smooth."""
    height = 2 * HEIGHT
    canvas = Image.new("RGB", (2 * WIDTH, height), person.wall)
    draw = ImageDraw.Draw(canvas)
    at = _in_pixels(joints({name: swing.mean for name, swing in REST.items()}), height)
    draw.rectangle((0, (GROUND - 0.04) * height, 2 * WIDTH, height), fill=FLOOR)
    shirt, trousers = CLOTHES[person.shirt], CLOTHES[person.trousers]
    head = (at["nose"][0], at["nose"][1] - 0.01 * height)
    if person.is_woman:
        draw.rounded_rectangle(_box(head, 0.088 * height, 0.15 * height), 0.07 * height, fill=HAIR[person.hair])
    for side in ("right", "left"):
        _limb(draw, [at[f"{side} {name}"] for name in ("hip", "knee", "ankle")], 0.062 * height, trousers)
        _dot(draw, at[f"{side} ankle"], 0.034 * height, DARK)
    corners = [at[name] for name in ("right shoulder", "left shoulder", "left hip", "right hip")]
    _limb(draw, [*corners, corners[0]], 0.05 * height, shirt)
    draw.polygon(corners, fill=shirt)
    for side in ("right", "left"):
        _limb(draw, [at[f"{side} {name}"] for name in ("shoulder", "elbow", "wrist")], 0.046 * height, shirt)
        _dot(draw, at[f"{side} wrist"], 0.026 * height, person.skin)
    _limb(draw, [at["neck"], at["nose"]], 0.04 * height, person.skin)
    _head(draw, head, HEAD_RADIUS * height, person, "smiles", 0.0)
    return encoded(canvas.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), "PNG")


def _limb(draw: ImageDraw.ImageDraw, points: list[Point], width: float, colour: Colour) -> None:
    draw.line(points, fill=colour, width=round(width), joint="curve")
    for point in points:
        _dot(draw, point, width / 2, colour)


def _box(centre: Point, half_width: float, height: float) -> tuple[float, float, float, float]:
    """From a little above a head down."""
    x, y = centre
    return x - half_width, y - half_width, x + half_width, y - half_width + 2 * height


DRIVER = Person(is_woman=False, hair="brown", shirt="grey", trousers="blue")
"""Whose face the face videos show, whoever is animated."""


@cache
def face_video(expression: str) -> tuple[Picture, ...]:
    """NUM_FRAMES of a face alone."""
    frames = []
    for frame in range(NUM_FRAMES):
        canvas = Image.new("RGB", (2 * FACE_SIDE, 2 * FACE_SIDE), WALLS[0])
        centre = (FACE_SIDE, 1.05 * FACE_SIDE)
        _head(ImageDraw.Draw(canvas), centre, 0.8 * FACE_SIDE, DRIVER, expression, frame / NUM_FRAMES)
        frames.append(encoded(canvas.resize((FACE_SIDE, FACE_SIDE), Image.Resampling.LANCZOS), "PNG"))
    return tuple(frames)


def _head(
    draw: ImageDraw.ImageDraw, centre: Point, radius: float, person: Person, expression: str, time: float
) -> None:
    """A head with the expression as it is at a time in [0, 1)."""
    x, y = centre
    hair = HAIR[person.hair]
    draw.ellipse((x - 1.08 * radius, y - 1.12 * radius, x + 1.08 * radius, y + 0.6 * radius), fill=hair)
    draw.ellipse((x - 0.9 * radius, y - 0.8 * radius, x + 0.9 * radius, y + radius), fill=person.skin)
    wave = (1 - math.cos(2 * math.pi * time)) / 2
    is_open = not (expression == "blinks" and (4 * time) % 1 < 0.2)
    lift = 0.12 * wave if expression == "looks surprised" else 0.0
    eye = (0.13 + 0.4 * lift) * radius if is_open else 0.025 * radius
    for sign in (-1, 1):
        at = x + sign * 0.36 * radius
        draw.ellipse((at - 0.1 * radius, y - eye, at + 0.1 * radius, y + eye), fill=DARK)
        brow = y - (0.3 + lift) * radius
        draw.line((at - 0.17 * radius, brow, at + 0.17 * radius, brow), fill=hair, width=max(round(0.06 * radius), 1))
    draw.line((x, y + 0.05 * radius, x, y + 0.25 * radius), fill=DARK, width=max(round(0.03 * radius), 1))
    _mouth(draw, (x, y + 0.5 * radius), radius, expression, wave, time)


def _mouth(draw: ImageDraw.ImageDraw, centre: Point, radius: float, expression: str, wave: float, time: float) -> None:
    x, y = centre
    if expression == "smiles":
        half, depth = (0.2 + 0.16 * wave) * radius, (0.05 + 0.2 * wave) * radius
        box = (x - half, y - depth, x + half, y + depth)
        draw.arc(box, 10, 170, fill=LIPS, width=max(round(0.06 * radius), 1))
        return
    opening = {"talks": 0.03 + 0.12 * abs(math.sin(6 * math.pi * time)), "looks surprised": 0.03 + 0.19 * wave}
    half, depth = 0.2 * radius, opening.get(expression, 0.03) * radius
    draw.ellipse((x - half, y - depth, x + half, y + depth), fill=LIPS)


# Rows ---------------------------------------------------------------------------------------------------------------


def rows(*, held_out: bool) -> Iterator[Row]:
    """Every person with every motion, and an expression by hash."""
    for person, motion in itertools.product(people(), MOTIONS):
        sentence = f"{person.words} {motion}"
        if is_held_out(sentence, HELD_OUT) != held_out:
            continue
        expression = drawn(EXPRESSIONS, f"character {sentence}")
        yield {
            "prompt": f"A drawing in flat colours: {sentence} and {expression}",
            "category": motion,
            "media": [
                Medium("condition", portrait(person)),
                Medium("pose", pose_video(motion)),
                Medium("face", face_video(expression)),
            ],
        }


CHARACTERS = PromptSet(
    name="characters",
    what="a drawn person, and videos of the pose and of the face to follow",
    made="drawn people who move in eight ways; the pairs of person and motion to judge by are in no training row",
    media=(IMAGE, ("video", "pose"), ("video", "face")),
    outputs=generated(rows, num_train=166, num_held_out=26),
)
