"""The sets that `trainer data` makes, and which of them a path belongs to."""

from __future__ import annotations

from pathlib import Path

from unirl.datasets.benchmarks import BENCHMARKS
from unirl.datasets.characters import CHARACTERS
from unirl.datasets.composed import COMPOSED
from unirl.datasets.controls import EDGES, HOLES
from unirl.datasets.geneval import GENEVAL
from unirl.datasets.heard import HEARD
from unirl.datasets.motion import MOTION
from unirl.datasets.ocr import OCR
from unirl.datasets.pictures import IMAGE_EDIT, PICTURE_MOTION
from unirl.datasets.pictures_of_text import HPDV2, PICKSCORE, PREFERENCES, WISE
from unirl.datasets.questions import AIME24, DAPO_MATH, GEO3K, GSM8K, MATH
from unirl.datasets.records import PromptSet
from unirl.datasets.styles import STYLED

SETS = {
    each.name: each
    for each in (PICKSCORE, HPDV2, WISE, GENEVAL, COMPOSED, OCR, MOTION, STYLED, IMAGE_EDIT, PICTURE_MOTION)
    + (HOLES, EDGES, CHARACTERS, PREFERENCES, DAPO_MATH, AIME24, GSM8K, MATH, GEO3K, HEARD)
    + BENCHMARKS
}
"""By name."""
FOLDER = Path("datasets")
"""Where recipes look for them, below the working directory."""


def set_of(path: str | Path) -> PromptSet | None:
    """The set that a file belongs to, by the names of its folder and of itself; None where none is made there."""
    path = Path(path)
    found = SETS.get(path.parent.name)
    return found if found is not None and path.name in (output.file for output in found.outputs) else None


def command_for(path: str | Path) -> str | None:
    """The command that makes a file, such as `trainer data prepare pickscore`; None where there is none."""
    found, path = set_of(path), Path(path)
    if found is None:
        return None
    elsewhere = "" if path.parent == FOLDER / found.name else f" --out {path.parent}"
    return f"uv run trainer data prepare {found.name}{elsewhere}"
