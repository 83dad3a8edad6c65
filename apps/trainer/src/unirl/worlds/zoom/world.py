"""The zoom world: a letter in an image, large enough to be read or so small that only a crop shows it.

The model sees every image at 32 x 32 pixels: a whole one at a quarter of its size, a cell of it as it is. `python -m
unirl.worlds.zoom.world --out DIR` writes the prompt files and their images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from unirl.pretraining.prompt_files import write_from_command_line, write_rows

Category = Literal["small", "large"]
SHARES: dict[Category, float] = {"small": 0.7, "large": 0.3}
"""Shares of the prompts."""
SIDE, CELL = 128, 32
"""Pixels of an image and of one of its cells."""
NUM_CELLS = (SIDE // CELL) ** 2
PROMPT = "which letter?"
NUM_TRAIN, NUM_HELDOUT, NUM_SOLVED = 1280, 400, 2400
SHEET_COLUMNS = 40
COLORS = ((255, 255, 255), (255, 221, 68), (119, 238, 119), (119, 204, 255), (255, 153, 204))
GROUNDS = ((0, 0, 0), (34, 34, 68), (68, 17, 17), (17, 51, 34), (51, 51, 51))
_SCALE: dict[Category, int] = {"small": 2, "large": 12}
"""Pixels of a dot of a letter."""
_SHIFT: dict[Category, int] = {"small": 6, "large": 18}
"""Most pixels that a letter is away from the middle of its cell, or of the image."""
_DOTS = 5
LETTERS: dict[str, str] = {
    "C": ".####|#....|#....|#....|.####",
    "H": "#...#|#...#|#####|#...#|#...#",
    "L": "#....|#....|#....|#....|#####",
    "O": ".###.|#...#|#...#|#...#|.###.",
    "S": ".####|#....|.###.|....#|####.",
    "T": "#####|..#..|..#..|..#..|..#..",
    "X": "#...#|.#.#.|..#..|.#.#.|#...#",
    "Z": "#####|...#.|..#..|.#...|#####",
}


@dataclass(frozen=True)
class Sight:
    """What an image shows."""

    letter: str
    category: Category
    cell: int
    """Row by row; of a large letter, which stands in the middle, it says nothing."""
    color: int
    ground: int
    shift: tuple[int, int]
    """Pixels down and right of the middle."""

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of its cell."""
        return box_of(self.cell)

    def image(self) -> np.ndarray:
        """uint8 [3, 128, 128]."""
        scale = _SCALE[self.category]
        dots = np.array([[dot == "#" for dot in row] for row in LETTERS[self.letter].split("|")])
        mask = np.kron(dots, np.ones((scale, scale), bool))
        left, top, right, bottom = self.box if self.category == "small" else (0, 0, SIDE, SIDE)
        y = (top + bottom - len(mask)) // 2 + self.shift[0]
        x = (left + right - len(mask)) // 2 + self.shift[1]
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        pixels[:] = GROUNDS[self.ground]
        pixels[y : y + len(mask), x : x + len(mask)][mask] = COLORS[self.color]
        return pixels.transpose(2, 0, 1)


def box_of(cell: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a cell."""
    row, column = divmod(cell, SIDE // CELL)
    return column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL


def is_held_out(sight: Sight) -> bool:
    """True for a tenth of all letters, cells and colours, by their hash: neither the base nor RL sees these."""
    said = f"{sight.letter} {sight.category} {sight.cell} {sight.color} {sight.ground}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:4]) < 0.1 * 2**32


def sights(
    num: int, rng: np.random.Generator, *, held_out: bool, shares: Mapping[Category, float] = SHARES
) -> list[Sight]:
    """So many of one side of the split, the categories in their shares, shuffled."""
    found: list[Sight] = []
    for category, share in shares.items():
        wanted = len(found) + round(share * num)
        while len(found) < wanted:
            down, right = rng.integers(-_SHIFT[category], _SHIFT[category] + 1, size=2).tolist()
            letter = list(LETTERS)[int(rng.integers(len(LETTERS)))]
            cell, color, ground = (int(rng.integers(n)) for n in (NUM_CELLS, len(COLORS), len(GROUNDS)))
            sight = Sight(letter, category, cell, color, ground, (down, right))
            if is_held_out(sight) == held_out:
                found.append(sight)
    return [found[place] for place in rng.permutation(len(found))]


def write_prompts(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl` and `solved.jsonl`, and a sheet of images for each, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, num) in enumerate((("train", NUM_TRAIN), ("heldout", NUM_HELDOUT))):
        found = sights(num, np.random.default_rng(seed), held_out=name == "heldout")
        write_rows(folder / f"{name}.jsonl", (_row(name, place, sight) for place, sight in enumerate(found)))
        _write_sheet(folder / f"{name}.png", found)
    found = sights(NUM_SOLVED, np.random.default_rng(NUM_SOLVED), held_out=False)
    write_rows(folder / "solved.jsonl", (solved(place, sight) for place, sight in enumerate(found)))
    _write_sheet(folder / "solved.png", found)


def _row(name: str, place: int, sight: Sight) -> dict[str, object]:
    return {
        "prompt": PROMPT,
        "prompt_id": f"zoom-{name}-{place:04d}",
        "media": [{"modality": "image", "role": "condition", "uri": _uri(name, place)}],
        "metadata": {"answer": sight.letter, "category": sight.category},
    }


def solved(place: int, sight: Sight) -> dict[str, object]:
    """A conversation that looks closer where it is needed, as fine-tuning files with images write it."""
    said: list[dict[str, object]] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    images = [_uri("solved", place)]
    if sight.category == "small":
        call = {"name": "crop", "arguments": json.dumps({"box": list(sight.box)})}
        said += [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": [{"type": "image"}]},
        ]
        images.append(_uri("solved", place, sight.box))
    return {
        "messages": [*said, {"role": "assistant", "content": sight.letter}],
        "images": images,
        "prompt_id": f"zoom-solved-{place:04d}",
        "metadata": {"answer": sight.letter, "category": sight.category},
    }


def _uri(name: str, place: int, box: tuple[int, int, int, int] = (0, 0, SIDE, SIDE)) -> str:
    """A part of an image of a sheet."""
    left, top, right, bottom = box
    x, y = place % SHEET_COLUMNS * SIDE + left, place // SHEET_COLUMNS * SIDE + top
    return f"{name}.png#xywh={x},{y},{right - left},{bottom - top}"


def _write_sheet(path: Path, found: Sequence[Sight]) -> None:
    rows = -(-len(found) // SHEET_COLUMNS)
    tiles = np.zeros((rows * SHEET_COLUMNS, 3, SIDE, SIDE), np.uint8)
    tiles[: len(found)] = np.stack([sight.image() for sight in found])
    sheet = tiles.reshape(rows, SHEET_COLUMNS, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2)
    image = Image.fromarray(sheet.reshape(rows * SIDE, SHEET_COLUMNS * SIDE, 3))
    num_colors = len(COLORS) + len(GROUNDS)
    image.quantize(num_colors, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
