"""Draws docs/images/worlds.png, the first held-out prompts of five worlds before and after training, from their runs:

    for name in shapes/nft edits/nft moves/nft phrases/both thoughts/nft; do
      uv run trainer worlds/$name run_dir=runs/worlds_image/$name
    done
    uv run python docs/images/worlds.py runs/worlds_image

No prompt is chosen: each row shows the first held-out ones of its run, right or wrong, in their order.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
CELL, GAP, LABEL, EDGE, CAPTION = 84, 8, 228, 3, 44
COLUMNS = 9
INK, MUTED, RIGHT, WRONG = (20, 20, 20), (95, 95, 95), (22, 163, 74), (220, 38, 38)
FRAMES = 3


@dataclass(frozen=True)
class World:
    """A row of the image."""

    recipe: str
    title: str
    model: str
    cells: int = 1
    """Squares that one sample takes: frames of a video."""


WORLDS = (
    World("shapes/nft", "Text to image", "Stable Diffusion 3"),
    World("edits/nft", "Image editing", "Qwen-Image-Edit"),
    World("moves/nft", "Text to video", "Wan 2.1", FRAMES),
    World("phrases/both", "Writer and painter", "Qwen3 writes, SD3 draws"),
    World("thoughts/nft", "Thinking, then drawing", "BAGEL"),
)


def records(run: Path) -> list[list[dict[str, Any]]]:
    """The image records of the first and of the last evaluation of a run, in the order of their prompts."""
    files = sorted((run / "samples").glob("eval-*.jsonl"))
    both = []
    for file in (files[0], files[-1]):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        both.append([line for line in lines if line["media"] and line["media"]["kind"] in ("image", "video")])
    return both


def pictures(run: Path, media: dict[str, Any]) -> list[Image.Image]:
    """A medium as images: a video as FRAMES of its frames, the first and the last among them."""
    path = run / "samples" / media["file"]
    if media["kind"] == "image":
        return [Image.open(path).convert("RGB")]
    with av.open(str(path)) as video:
        frames = [frame.to_image() for frame in video.decode(video=0)]
    return [frames[round(index * (len(frames) - 1) / (FRAMES - 1))] for index in range(FRAMES)]


def is_right(record: dict[str, Any]) -> bool:
    """True if the world's strict verifier accepts a sample."""
    return next(score for name, score in record["scores"].items() if name.endswith("/strict")) == 1


def accuracy(run: Path) -> tuple[float, float, int]:
    """Held-out accuracy before and after, over all held-out prompts, and the CPU seconds between."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    name = next(key for line in lines for key in line if key.startswith("eval/") and key.endswith("/strict"))
    values = [line[name] for line in lines if name in line]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return values[0], values[-1], round(sum(summary["phases_cpu_s"].values()))


def text_lines(draw: ImageDraw.ImageDraw, text: str, font: Font, width: int) -> list[str]:
    """The text in at most three lines of a width in pixels."""
    lines, line = [], ""
    for word in text.split():
        if line and draw.textlength(f"{line} {word}", font) > width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line][:3]


def draw_world(sheet: Image.Image, top: int, world: World, run: Path) -> None:
    """One row of the sheet: what was given, before, after, and the prompts."""
    draw = ImageDraw.Draw(sheet)
    big, small = ImageFont.load_default(17), ImageFont.load_default(12)
    before, after, seconds = accuracy(run)
    draw.text((GAP, top), world.title, INK, big)
    draw.text((GAP, top + 24), world.model, MUTED, small)
    draw.text((GAP, top + 48), f"{before:.0%} right before", WRONG, small)
    draw.text((GAP, top + 66), f"{after:.0%} right after", RIGHT, small)
    draw.text((GAP, top + 90), f"trained {seconds} s on one core", MUTED, small)
    names = ("given", "before", "after")[0 if records(run)[0][0]["given"] else 1 :]
    for row, name in enumerate(names):
        middle = top + row * (CELL + GAP) + CELL // 2 - 7
        draw.text((LABEL - GAP - draw.textlength(name, small), middle), name, MUTED, small)
    pairs = list(zip(*records(run), strict=True))[: COLUMNS // world.cells]
    for index, pair in enumerate(pairs):
        left = LABEL + index * world.cells * (CELL + GAP)
        width = world.cells * (CELL + GAP) - GAP
        shown = [(pictures(run, given)[:1], None) for given in pair[0]["given"][:1]]
        shown += [(pictures(run, record["media"]), is_right(record)) for record in pair]
        for row, (images, verdict) in enumerate(shown):
            y = top + row * (CELL + GAP)
            if verdict is not None:
                draw.rectangle((left, y, left + width - 1, y + CELL - 1), fill=RIGHT if verdict else WRONG)
            for place, image in enumerate(images):
                inner = CELL - 2 * EDGE
                x = left + EDGE + place * (width - 2 * EDGE + 2) // len(images)
                sheet.paste(image.resize((inner, inner), Image.Resampling.NEAREST), (x, y + EDGE))
        y = top + len(shown) * (CELL + GAP) - 2
        for line in text_lines(draw, pair[0]["prompt"], small, width + GAP - 2):
            draw.text((left, y), line, INK, small)
            y += 14


def main() -> None:
    """Draw the sheet from the runs in a folder."""
    runs = Path(sys.argv[1])
    heights = []
    for world in WORLDS:
        rows = 3 if records(runs / world.recipe)[0][0]["given"] else 2
        heights.append(rows * (CELL + GAP) + CAPTION + 2 * GAP)
    sheet = Image.new("RGB", (LABEL + COLUMNS * (CELL + GAP), sum(heights) + GAP), "white")
    top = GAP
    for world, height in zip(WORLDS, heights, strict=True):
        draw_world(sheet, top, world, runs / world.recipe)
        top += height
    sheet.quantize(128).save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
