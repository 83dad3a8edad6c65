"""Prompts of videos: who does what, in which direction, where, and what the camera does. Generated.

After the dimensions that VBench judges (arXiv 2311.17982): subject consistency, human action, spatial relation, camera
motion. Held-out prompts have subjects with actions that the training file does not have together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import distinct, drawn, first_by_hash, is_held_out


@dataclass(frozen=True)
class Kind:
    """Subjects that can do the same things in the same places."""

    name: str
    subjects: tuple[str, ...]
    actions: tuple[str, ...]
    """In the third person."""
    places: tuple[str, ...]


KINDS = (
    Kind(
        "animal",
        ("a brown dog", "a tabby cat", "a white horse", "a red fox", "a grey rabbit", "a small elephant", "a lion cub")
        + ("a young deer", "a brown bear", "a black goat", "a striped zebra", "a tall giraffe"),
        ("walks", "runs", "trots", "limps", "creeps", "hurries", "wanders", "leaps"),
        ("across a meadow", "along a sandy beach", "through fresh snow", "on a forest path", "in a dusty yard"),
    ),
    Kind(
        "bird or fish",
        ("a white seagull", "a barn owl", "a flock of starlings", "a hummingbird", "a bald eagle", "a blue butterfly")
        + ("a goldfish", "a sea turtle", "a manta ray", "a school of silver fish"),
        ("glides", "drifts", "darts", "moves slowly", "moves quickly", "moves in short bursts"),
        ("in clear light", "over dark rocks", "in front of a pale background", "above green plants"),
    ),
    Kind(
        "person",
        ("an old man", "a girl in a yellow coat", "a young woman", "a boy with a backpack", "a clown", "a dancer")
        + ("a chef in a white apron", "a farmer", "a nurse", "a man who pushes a bicycle"),
        ("walks", "runs", "skips", "strides", "dances", "tiptoes", "marches", "strolls"),
        ("along a city street", "through a park", "across an empty square", "in a long corridor", "on a wooden pier")
        + ("along a muddy field",),
    ),
    Kind(
        "vehicle",
        ("a red car", "a yellow bus", "a green tractor", "a steam train", "a blue motorcycle", "a white van")
        + ("a tram", "a bicycle with a rider", "a fire engine", "a toy truck"),
        ("moves", "rolls slowly", "speeds", "sets off", "jolts", "moves steadily"),
        ("under a grey sky", "at sunset", "in light rain", "in bright sun", "at night under street lamps"),
    ),
    Kind(
        "object",
        ("a red ball", "a wooden wheel", "a blue balloon", "a silver coin", "a glass marble", "a green cube")
        + ("a yellow cylinder", "an orange", "a paper cup", "a tennis ball"),
        ("moves", "slides", "tumbles", "rolls slowly", "moves quickly", "bounces"),
        ("on a white table", "on a wet pavement", "on a tiled floor", "on a wooden floor"),
    ),
)
DIRECTIONS = (
    "from left to right",
    "from right to left",
    "towards the camera",
    "away from the camera",
    "from the background to the foreground",
    "in a wide circle",
    "diagonally across the picture",
)
CAMERAS = {
    "static": "static camera",
    "pan left": "the camera pans left",
    "pan right": "the camera pans right",
    "tilt up": "the camera tilts up",
    "tilt down": "the camera tilts down",
    "zoom in": "the camera zooms in",
    "zoom out": "the camera zooms out",
    "tracking": "the camera follows alongside",
    "orbit": "the camera moves around the subject",
}
HELD_OUT = 0.12
"""Fraction of the pairs of a subject with an action, or with what else a set pairs it."""
PER_PAIR = 8
"""Prompts that a pair gets, before repeats are taken out."""
NUM_TRAIN, NUM_HELD_OUT = 1800, 200


def rows(*, held_out: bool) -> list[Row]:
    """Prompts of all kinds, in the order of their hashes."""
    pairs = (
        (kind, subject, action) for kind in KINDS for subject, action in itertools.product(kind.subjects, kind.actions)
    )
    return rows_of_pairs(pairs, _row, PER_PAIR, held_out=held_out)


def rows_of_pairs(
    pairs: Iterable[tuple[Kind, str, str]], make: Callable[[Kind, str, str, int], Row], num: int, *, held_out: bool
) -> list[Row]:
    """Prompts of subjects with something else each, in the order of their hashes.

    make: the row of a pair and a number below `num`, how many a pair gets before repeats are taken out.
    """
    chosen = (pair for pair in pairs if is_held_out(f"{pair[1]} {pair[2]}", HELD_OUT) == held_out)
    found = distinct((make(*pair, number) for pair in chosen for number in range(num)), lambda row: row["prompt"])
    return first_by_hash(found, NUM_HELD_OUT if held_out else NUM_TRAIN, lambda row: row["prompt"])


def _row(kind: Kind, subject: str, action: str, number: int) -> Row:
    key = f"motion {subject} {action} {number}"
    place, direction = drawn(kind.places, f"{key} place"), drawn(DIRECTIONS, f"{key} direction")
    camera = drawn(tuple(CAMERAS), f"{key} camera")
    sentence = f"{subject} {action} {direction} {place}, {CAMERAS[camera]}"
    return {
        "prompt": sentence[0].upper() + sentence[1:],
        "category": kind.name,
        "subject": subject,
        "action": action,
        "direction": direction,
        "place": place,
        "camera": camera,
    }


MOTION = PromptSet(
    name="motion",
    what="prompts of videos: subject, action, direction, place and camera",
    made="templates; the pairs of subject and action to judge by do not occur in the training file",
    outputs=generated(rows, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT),
)
