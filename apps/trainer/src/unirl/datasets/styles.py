"""Prompts of videos in a style: who does what, where, and how it is painted or filmed. Generated.

After VBench's appearance style (arXiv 2311.17982). Held-out prompts have subjects in styles that the training file does
not have together.
"""

from __future__ import annotations

import itertools

from unirl.datasets.benchmarks import VBENCH_STYLE
from unirl.datasets.motion import KINDS, NUM_HELD_OUT, NUM_TRAIN, Kind, rows_of_pairs
from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import drawn

STYLES = (
    "Van Gogh style",
    "oil painting",
    "watercolor painting",
    "pencil drawing",
    "in the style of Ukiyo-e",
    "pixel art",
) + ("black and white film", "in cyberpunk style", "animated style", "surrealism style", "paper cutout", "claymation")
PER_PAIR = 4
"""Prompts that a pair gets, before repeats are taken out."""


def rows(*, held_out: bool) -> list[Row]:
    """Prompts of all kinds and styles, in the order of their hashes."""
    pairs = ((kind, subject, style) for kind in KINDS for subject, style in itertools.product(kind.subjects, STYLES))
    return rows_of_pairs(pairs, _row, PER_PAIR, held_out=held_out)


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
