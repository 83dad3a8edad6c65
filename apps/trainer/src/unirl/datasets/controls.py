"""Captioned images with what is left of them: a hole to fill, or their edges."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator

from PIL import Image, ImageDraw

from unirl.datasets.captioned import CAPTIONED, SIDE, captioned_pictures, encoded, pick_a_pic
from unirl.datasets.records import IMAGE, Files, Medium, PromptSet, Row, both_splits
from unirl.datasets.splitting import drawn, fraction_of

HOLES_IN = ("box", "strokes", "border")
"""Something in the middle, brush strokes, and all beyond one side of the image."""
WHITE = 255


def hole(kind: str, key: str) -> Image.Image:
    """A mask of SIDE x SIDE, white where to fill: .08 to .65 of it. Its place and size depend on `key` alone."""
    mask = Image.new("L", (SIDE, SIDE))
    draw = ImageDraw.Draw(mask)
    if kind == "box":
        width, height = (_between(0.3, 0.7, f"{key} {name}") * SIDE for name in ("width", "height"))
        left, top = (_between(0, SIDE - side, f"{key} {name}") for side, name in ((width, "left"), (height, "top")))
        draw.rectangle((left, top, left + width, top + height), fill=WHITE)
    elif kind == "border":
        share = _between(0.2, 0.45, f"{key} share") * SIDE
        left, right = (0, 0, share, SIDE), (SIDE - share, 0, SIDE, SIDE)
        top, bottom = (0, 0, SIDE, share), (0, SIDE - share, SIDE, SIDE)
        draw.rectangle(drawn((left, right, top, bottom), f"{key} side"), fill=WHITE)
    else:
        for stroke in range(3):
            _brush(draw, f"{key} stroke {stroke}")
    return mask


def _brush(draw: ImageDraw.ImageDraw, key: str) -> None:
    """A bent stroke with round ends."""
    radius = _between(0.05, 0.08, f"{key} radius") * SIDE
    points = [
        tuple(_between(0.15, 0.85, f"{key} {number} {axis}") * SIDE for axis in ("x", "y")) for number in range(4)
    ]
    draw.line(points, fill=WHITE, width=round(2 * radius), joint="curve")
    for x, y in points:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=WHITE)


def _between(low: float, high: float, key: str) -> float:
    return low + (high - low) * fraction_of(key)


def _holes(files: Files, *, held_out: bool) -> Iterator[Row]:
    for caption, picture in captioned_pictures(files, held_out=held_out):
        key = f"hole {hashlib.sha256(picture.data).hexdigest()}"
        kind = drawn(HOLES_IN, f"{key} kind")
        mask = encoded(hole(kind, key), "PNG")
        media = [Medium("condition", picture), Medium("mask", mask)]
        yield {"prompt": caption, "media": media, "category": kind}


def _edges(files: Files, *, held_out: bool) -> Iterator[Row]:
    from unirl.datasets.canny import edges_of  # needs numpy, which listing the sets does without

    for caption, picture in captioned_pictures(files, held_out=held_out):
        with Image.open(io.BytesIO(picture.data)) as opened:
            yield {"prompt": caption, "images": [encoded(edges_of(opened), "PNG")]}


HOLES = PromptSet(
    name="holes",
    what="an image, a mask of what to fill, and the caption of the whole",
    made=f"the preferred image of each caption, {SIDE} x {SIDE}, and a box, strokes or a border; 10% held out",
    media=(IMAGE, ("image", "mask")),
    sources=(pick_a_pic(CAPTIONED),),
    outputs=both_splits(_holes, suffix=".jsonl", reads=(CAPTIONED,)),
    takes_own=True,
)
EDGES = PromptSet(
    name="edges",
    what="the edges of an image, white on black, and its caption",
    made=f"Canny's edges of the preferred image of each caption, {SIDE} x {SIDE}; 10% held out by hash",
    media=(IMAGE,),
    sources=(pick_a_pic(CAPTIONED),),
    outputs=both_splits(_edges, suffix=".jsonl", reads=(CAPTIONED,)),
    takes_own=True,
)
