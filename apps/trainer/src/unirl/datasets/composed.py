"""Prompts of several objects with numbers, colours and places, and the questions that a judge answers of their images.

Each row has what `GenEval2Scorer` reads (`vqa_list`) and what `DPGScorer` reads (`questions`). The prompts of the two
benchmarks themselves are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unirl.datasets.geneval import COLOURS, NO_COLOUR, NO_NUMBER, NUMBERS, RELATIONS, names, one, several
from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import drawn, is_held_out, several_drawn

NUM_TRAIN, NUM_HELD_OUT = 4000, 200
HELD_OUT = 0.1
NUM_OBJECTS = (2, 3)
_NAMES = tuple(name for name in names if name not in NO_COLOUR | NO_NUMBER)
_NUMBERS = {1: "one", **NUMBERS}


def rows(*, held_out: bool) -> Iterator[Row]:
    """Different prompts; held-out ones are chosen by their hash."""
    wanted, seen, number = NUM_HELD_OUT if held_out else NUM_TRAIN, set[str](), 0
    while len(seen) < wanted:
        row = _row(number)
        number += 1
        if row["prompt"] not in seen and is_held_out(row["prompt"], HELD_OUT) == held_out:
            seen.add(row["prompt"])
            yield row


def _row(number: int) -> Row:
    at = f"composed {number}"
    chosen = several_drawn(_NAMES, drawn(NUM_OBJECTS, f"{at} size"), at)
    counts = [drawn(tuple(_NUMBERS), f"{at} count {place}") for place in range(len(chosen))]
    colours = several_drawn(COLOURS, len(chosen), f"{at} colours")
    parts = [
        one(name, colour) if count == 1 else f"{_NUMBERS[count]} {colour} {several(name)}"
        for name, count, colour in zip(chosen, counts, colours, strict=True)
    ]
    things = [name if count == 1 else several(name) for name, count in zip(chosen, counts, strict=True)]
    relation = drawn(RELATIONS, f"{at} relation")
    placed = f"the {things[0]} {relation} the {things[1]}"
    asked, there = _Questions(), list[int]()
    for name, count, colour, thing in zip(chosen, counts, colours, things, strict=True):
        is_there = asked.add(f"Is there {one(name)} in the image?")
        coloured = f"{_verb(count)} the {thing} {colour}?"
        asked.add(f"{_verb(count)} there exactly {_NUMBERS[count]} {thing}?", [is_there])
        asked.add(coloured, [is_there])
        asked.atoms += [[f"How many {several(name)} are in the image?", _NUMBERS[count]], [coloured, "Yes"]]
        there.append(is_there)
    related = f"{_verb(counts[0])} {placed}?"
    asked.add(related, there[:2])
    asked.atoms.append([related, "Yes"])
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return {
        "prompt": f"{listed}, {placed}",
        "category": f"{len(chosen)} objects",
        "vqa_list": asked.atoms,
        "questions": asked.questions,
    }


def _verb(count: int) -> str:
    return "Is" if count == 1 else "Are"


class _Questions:
    """The propositions of a prompt: as pairs of question and answer, and as questions that depend on one another."""

    def __init__(self) -> None:
        self.atoms: list[list[str]] = []
        self.questions: list[dict[str, Any]] = []  # Any: JSON

    def add(self, question: str, parents: Sequence[int] = ()) -> int:
        """Its id, which others name as their parent."""
        number = len(self.questions) + 1
        self.questions.append({"id": number, "question": question, "parents": list(parents)})
        return number


COMPOSED = PromptSet(
    name="composed",
    what="two or three objects with numbers, colours and a place, with questions for a judge",
    made="templates over the classes of COCO; a tenth held out by hash",
    outputs=generated(rows, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT),
)
