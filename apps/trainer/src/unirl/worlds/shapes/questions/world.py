"""Questions about images of shapes, their answers, and the answers of a pupil with two bad habits.

A scene is a layout of the shapes world with two to four objects; a question shows one scene or two. `python -m
unirl.worlds.shapes.questions.world --out DIR` writes the question files and their images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unirl.pretraining.prompt_files import write_from_command_line, write_rows
from unirl.reward.worlds.shapes_grammar import COLORS, SHAPES
from unirl.worlds.shapes import world
from unirl.worlds.shapes.sheet import coarse, tile_uri, write_sheet
from unirl.worlds.shapes.world import OBJECTS, Layout

CATEGORY_SHARES: Mapping[str, float] = MappingProxyType(
    {"color": 0.2, "shape": 0.2, "place": 0.2, "count": 0.2, "compare": 0.2}
)
"""Shares of the questions. In the first two categories the pupil's habits are right, in the others wrong."""
PLACES: tuple[str, ...] = ("top left", "top right", "bottom left", "bottom right")
"""Names of the quadrants, in the order of a layout."""
NUMBERS: tuple[str, ...] = ("0", "1", "2", "3", "4")
ORDER: tuple[str, ...] = ("first", "second")
HELDOUT_FRACTION = 0.1
"""Fraction of all scenes; neither the base nor RL has seen these."""
NUM_TRAIN = 1280
NUM_HELDOUT = 400
SHEET_COLUMNS = 40

_NUM_OBJECTS = {2: 0.35, 3: 0.4, 4: 0.25}
"""Shares of scenes by their number of objects."""


@dataclass(frozen=True)
class Question:
    """A question about one scene, or two."""

    category: str
    scenes: tuple[Layout, ...]
    subject: str
    """What it asks about: a shape, a colour or a place."""

    @property
    def prompt(self) -> str:
        """For example "how many circles?"."""
        return {
            "color": f"what color is the {self.subject}?",
            "shape": f"what shape is {self.subject}?",
            "place": f"what color is {self.subject}?",
            "count": f"how many {self.subject}s?",
            "compare": f"which has more {self.subject}s?",
        }[self.category]

    @property
    def answer(self) -> str:
        """One word or digit."""
        counts = [sum(item is not None and item.shape == self.subject for item in scene) for scene in self.scenes]
        return {
            "color": lambda: next(i.color for i in self._items if i.shape == self.subject),
            "shape": lambda: next(i.shape for i in self._items if i.color == self.subject),
            "place": lambda: self._color_at(PLACES.index(self.subject)),
            "count": lambda: str(counts[0]),
            "compare": lambda: ORDER[int(np.argmax(counts))],
        }[self.category]()

    @property
    def habit(self) -> str:
        """What a pupil says who mixes up left and right, and who counts every object whatever was asked for."""
        if self.category == "place":
            return self._color_at(PLACES.index(self.subject) ^ 1)  # the other one of its row
        if self.category == "count":
            return str(len(self._items))
        if self.category == "compare":
            return ORDER[1 - ORDER.index(self.answer)]
        return self.answer

    @property
    def slips(self) -> tuple[str, ...]:
        """The other answers of its kind."""
        kind = {"shape": SHAPES, "count": NUMBERS, "compare": ORDER}.get(self.category, COLORS)
        return tuple(other for other in kind if other != self.answer)

    @property
    def _items(self) -> list[world.ShapeObject]:
        return [item for item in self.scenes[0] if item is not None]

    def _color_at(self, place: int) -> str:
        item = self.scenes[0][place]
        if item is None:
            raise ValueError(f"nothing stands at the {PLACES[place]} of {self.scenes[0]}")
        return item.color


def is_heldout(scene: Layout) -> bool:
    """True if a scene is kept from pretraining and RL: by the hash of what it shows."""
    digest = hashlib.sha256(", ".join(map(str, scene)).encode()).digest()
    return int.from_bytes(digest[:4]) < HELDOUT_FRACTION * 2**32


def draw_question(category: str, rng: np.random.Generator, *, heldout: bool) -> Question:
    """A question of this category about scenes of one side of the split; habits go wrong in the last three."""
    while True:
        scenes = tuple(_draw_scene(rng, heldout) for _ in range(2 if category == "compare" else 1))
        subjects = {"shape": COLORS, "place": PLACES}.get(category, SHAPES)
        subject = subjects[int(rng.integers(len(subjects)))]
        if _can_be_asked(category, scenes, subject):
            return Question(category, scenes, subject)


def _can_be_asked(category: str, scenes: tuple[Layout, ...], subject: str) -> bool:
    """True if there is one answer, and a habit that can be told from it."""
    if category in ("color", "shape"):
        named = [item.shape if category == "color" else item.color for item in scenes[0] if item is not None]
        return named.count(subject) == 1
    if category == "place":
        place = PLACES.index(subject)
        here, there = scenes[0][place], scenes[0][place ^ 1]
        return here is not None and there is not None and here.color != there.color
    counts = [sum(item is not None and item.shape == subject for item in scene) for scene in scenes]
    if category == "count":
        return counts[0] != sum(item is not None for item in scenes[0])
    return counts[0] != counts[1]


def _draw_scene(rng: np.random.Generator, heldout: bool) -> Layout:
    while True:
        number = int(rng.choice(list(_NUM_OBJECTS), p=list(_NUM_OBJECTS.values())))
        items: list[world.ShapeObject | None] = [OBJECTS[int(rng.integers(len(OBJECTS)))] for _ in range(number)]
        items += [None] * (4 - number)
        first, second, third, fourth = (items[i] for i in rng.permutation(4))
        scene = (first, second, third, fourth)
        if is_heldout(scene) == heldout:
            return scene


def draw_questions(
    number: int, rng: np.random.Generator, *, heldout: bool, shares: Mapping[str, float] = CATEGORY_SHARES
) -> list[Question]:
    """Questions with the categories in their shares, shuffled."""
    questions = [
        draw_question(category, rng, heldout=heldout)
        for category, share in shares.items()
        for _ in range(round(share * number))
    ]
    return [questions[i] for i in rng.permutation(len(questions))]


def draw_pictures(question: Question, rng: np.random.Generator) -> list[np.ndarray]:
    """A drawing of each scene, uint8 [3, 32, 32]."""
    return [coarse(world.render(scene, rng)) for scene in question.scenes]


def write_questions(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl` and a sheet of images next to each, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name, number in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        pictures: list[np.ndarray] = []
        lines: list[Mapping[str, object]] = []
        for row, question in enumerate(draw_questions(number, rng, heldout=name == "heldout")):
            media = []
            for picture in draw_pictures(question, rng):
                uri = tile_uri(f"{name}.png", len(pictures), SHEET_COLUMNS)
                media.append({"modality": "image", "role": "condition", "uri": uri})
                pictures.append(picture)
            line = {
                "prompt": question.prompt,
                "prompt_id": f"questions-{name}-{row:04d}",
                "media": media,
                "metadata": {"answer": question.answer, "category": question.category},
            }
            lines.append(line)
        write_rows(folder / f"{name}.jsonl", lines)
        write_sheet(folder / f"{name}.png", pictures, SHEET_COLUMNS)


if __name__ == "__main__":
    write_from_command_line(write_questions, __doc__)
