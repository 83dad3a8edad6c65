"""Prompts of GenEval's six tasks with the metadata that `GenEvalScorer` reads, generated.

They are not the 553 prompts that GenEval is published with, but some of those are among them: both come from the same
templates and classes. Judge by the held-out file, or take out of the training file what you judge by.
Source of the tasks: GenEval (arXiv 2310.11513), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import drawn, first_by_hash, is_held_out, several_drawn

CLASSES = (
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter "
    "bench bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee "
    "skis snowboard sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass "
    "cup fork knife spoon bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch "
    "potted_plant bed dining_table toilet tv laptop computer_mouse tv_remote computer_keyboard cell_phone microwave "
    "oven toaster sink refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"
)
"""The 80 classes of COCO in the names that GenEval gives them, underscores for spaces."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

NO_NUMBER = frozenset({"broccoli", "scissors", "skis"})
"""Objects that are not counted without a further word."""
NO_COLOUR = frozenset({"person", "orange"})
"""GenEval asks for no coloured person; a blue orange is two things to a reader."""
IRREGULAR = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}

HELD_OUT = 0.2
MAX_TRAIN, MAX_HELD_OUT = 2000, 100
"""Prompts of a task."""
NUM_DRAWN = 3000
"""Rows per task that has more combinations than are needed."""

names = tuple(word.replace("_", " ") for word in CLASSES.split())
coloured_names = tuple(name for name in names if name not in NO_COLOUR)


def rows(*, held_out: bool) -> Iterator[Row]:
    """Prompts of all tasks, one task after the other; held-out prompts are chosen by their hash."""
    limit = MAX_HELD_OUT if held_out else MAX_TRAIN
    for task, candidates in _CANDIDATES.items():
        by_prompt = {row["prompt"]: row for row in candidates()}
        chosen = [row for row in by_prompt.values() if is_held_out(row["prompt"], HELD_OUT) == held_out]
        for row in first_by_hash(chosen, limit, lambda row: row["prompt"]):
            yield {"prompt": row["prompt"], "tag": task, "category": task, **row["asked"]}


def _row(words: str, *include: dict[str, Any], exclude: list[dict[str, Any]] | None = None) -> Row:  # Any: clauses
    asked: dict[str, Any] = {"include": list(include)}
    if exclude is not None:
        asked["exclude"] = exclude
    return {"prompt": f"a photo of {words}", "asked": asked}


def _single_objects() -> Iterator[Row]:
    for name in names:
        yield _row(one(name), _clause(name))


def _two_objects() -> Iterator[Row]:
    for first, second in itertools.permutations(names, 2):
        yield _row(f"{one(first)} and {one(second)}", _clause(first), _clause(second))


def _counts() -> Iterator[Row]:
    """One more is excluded, else three would do for two."""
    for name, (count, word) in itertools.product(names, NUMBERS.items()):
        if name not in NO_NUMBER:
            yield _row(f"{word} {several(name)}", _clause(name, count), exclude=[_clause(name, count + 1)])


def _colours() -> Iterator[Row]:
    for name, colour in itertools.product(coloured_names, COLOURS):
        yield _row(one(name, colour), _clause(name, color=colour))


def _positions() -> Iterator[Row]:
    """The clause with the position comes second: it names the index of the object that it is seen from."""
    for number in range(NUM_DRAWN):
        first, second = several_drawn(names, 2, f"geneval position {number}")
        relation = drawn(RELATIONS, f"geneval relation {number}")
        placed = _clause(first, position=[relation, 0])
        yield _row(f"{one(first)} {relation} {one(second)}", _clause(second), placed)


def _colour_pairs() -> Iterator[Row]:
    for number in range(NUM_DRAWN):
        first, second = several_drawn(coloured_names, 2, f"geneval color_attr {number}")
        colours = several_drawn(COLOURS, 2, f"geneval color_attr colours {number}")
        yield _row(
            f"{one(first, colours[0])} and {one(second, colours[1])}",
            _clause(first, color=colours[0]),
            _clause(second, color=colours[1]),
        )


_CANDIDATES: dict[str, Callable[[], Iterator[Row]]] = dict(
    zip(TASKS, (_single_objects, _two_objects, _counts, _colours, _positions, _colour_pairs), strict=True)
)


def _clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:  # Any: color or position
    return {"class": name, "count": count, **more}


def one(name: str, colour: str = "") -> str:
    """An object with its article, which those have not that are not counted."""
    words = f"{colour} {name}".strip()
    if name in NO_NUMBER:
        return words
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def several(name: str) -> str:
    """The plural of an object's name."""
    if name in IRREGULAR:
        return IRREGULAR[name]
    return f"{name}es" if name.endswith(("s", "x", "sh", "ch")) else f"{name}s"


GENEVAL = PromptSet(
    name="geneval",
    what="the six tasks of GenEval over the classes of COCO, with what its scorer asks for",
    made="templates; a fifth held out by hash, at most 100 prompts of a task",
    outputs=generated(rows, num_train=6878, num_held_out=454),
)
