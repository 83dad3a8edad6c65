"""Prompts of videos in a style: who does what, where, and how it is painted or filmed. Generated.

After VBench's appearance style (arXiv 2311.17982). Held-out prompts have subjects in styles that the training file does
not have together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from unirl.datasets.benchmarks import VBENCH_STYLE
from unirl.datasets.motion import KINDS, Kind
from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import distinct, drawn, first_by_hash, is_held_out

STYLES = (
    "Van Gogh style",
    "oil painting",
    "watercolor painting",
    "pencil drawing",
    "in the style of Ukiyo-e",
    "pixel art",
) + ("black and white film", "in cyberpunk style", "animated style", "surrealism style", "paper cutout", "claymation")
HELD_OUT = 0.12
"""Fraction of the pairs of subject and style."""
PER_PAIR = 4
"""Prompts that a pair gets, before repeats are taken out."""
NUM_TRAIN, NUM_HELD_OUT = 1800, 200


def rows(*, held_out: bool) -> Iterator[Row]:
    """Prompts of all kinds and styles, in the order of their hashes."""
    pairs = ((kind, subject, style) for kind in KINDS for subject, style in itertools.product(kind.subjects, STYLES))
    chosen = (pair for pair in pairs if is_held_out(f"{pair[1]} {pair[2]}", HELD_OUT) == held_out)
    found = distinct((_row(*pair, number) for pair in chosen for number in range(PER_PAIR)), lambda row: row["prompt"])
    yield from first_by_hash(found, NUM_HELD_OUT if held_out else NUM_TRAIN, lambda row: row["prompt"])


def _row(kind: Kind, subject: str, style: str, number: int) -> Row:
    key = f"style {subject} {style} {number}"
    action, place = drawn(kind.actions, f"{key} action"), drawn(kind.places, f"{key} place")
    sentence = f"{subject} {action} {place}, {style}"
    return {
        "prompt": sentence[0].upper() + sentence[1:],
        "category": kind.name,
        "subject": subject,
        "action": action,
        "place": place,
        VBENCH_STYLE: style,
    }


STYLED = PromptSet(
    name="styles",
    what="prompts of videos in a style: subject, action, place and the words of the style",
    made="templates; the pairs of subject and style to judge by do not occur in the training file",
    outputs=generated(rows, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT),
)
