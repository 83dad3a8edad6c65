"""Labelled grids of samples, for people to look at. Legend: N images."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from unirl.types.errors import ContractError

TARGET_SIDE = 160
"""Pixels that the shorter side of a cell aims at: small samples are enlarged by a whole factor."""
MAX_SIDE = 512
"""Most pixels of a cell's longer side."""
MARGIN = 6
FONT_SIZE = 12
MAX_CAPTION_LINES = 3
BACKGROUND = (255, 255, 255)
INK, GREEN, RED = (30, 30, 30), (0, 120, 40), (190, 20, 20)
SHEET_WIDTH = 1400
"""Pixels that a grid of answers aims at."""
FRAME = 3
"""Pixels of the line around an image that is right or wrong."""

Mark = tuple[str, bool | None]
"""What to say of a sample, and whether it is right; None where nothing says so."""
Caption = list[tuple[str, tuple[int, int, int], int]]
"""Texts below a cell, each with its colour and the lines that it may take."""


def marks(scores: Sequence[Mapping[str, float] | None], metric: str) -> list[Mark]:
    """Score of each sample in words, with pass or fail where `metric` is 0 or 1 for all that have a score.

    scores: reward and components of a sample; None for one without a score. metric: the one that runs are judged by.
    """
    judged = [values[metric] for values in scores if values is not None and metric in values]
    is_binary = bool(judged) and set(judged) <= {0.0, 1.0}
    return [_mark(values, metric, is_binary=is_binary) for values in scores]


def _mark(values: Mapping[str, float] | None, metric: str, *, is_binary: bool) -> Mark:
    if values is None:
        return "no score", None
    reward = f"reward {values['reward']:.3g}"
    if metric not in values or (metric == "reward" and not is_binary):
        return reward, None
    if is_binary:
        passes = values[metric] == 1
        return f"{'pass' if passes else 'fail'}, {reward}", passes
    return f"{metric} {values[metric]:.3g}, {reward}", None


def grid(
    images: Tensor,
    labels: Sequence[str] | None = None,
    columns: int | None = None,
    scale: int | None = None,
    marked: Sequence[Mark] | None = None,
    given: Sequence[Sequence[Tensor]] = (),
) -> Image.Image:
    """A grid of images with their captions underneath, each next to what it was made from.

    images: [N, 3, H, W] (or [N, 1, H, W]) in [0, 1]; values outside are clamped. labels: N captions, wrapped and cut to
    three lines. columns: None makes the grid about square. scale: whole factor that images are enlarged by; None brings
    small ones to about 160 pixels. marked: N texts below the captions; what is right or wrong gets a green or red
    frame. given: the images that each of N prompts shows, any number of [3, H, W] of any size; empty where none shows
    any. Raises ContractError for another shape or number of labels, marks or given images.
    """
    captions = _plain(_checked(images, labels))
    if marked is not None:
        _check_marks(images, marked)
        for caption, mark in zip(captions, marked, strict=True):
            caption.append((mark[0], _ink(mark), 1))
    cells = [[_enlarged(image, scale)] for image in images]
    frames = None if marked is None else [[mark[1]] for mark in marked]
    return _beside_given(cells, captions, columns, given, titles=("made",) if any(given) else (), frames=frames)


def before_after(
    before: Tensor,
    after: Tensor,
    labels: Sequence[str],
    columns: int | None = None,
    marked: tuple[Sequence[Mark], Sequence[Mark]] | None = None,
    given: Sequence[Sequence[Tensor]] = (),
) -> Image.Image:
    """Pairs of images of the same prompt and noise, side by side: left before training, right after.

    before, after: [N, 3, H, W] in [0, 1]. marked: of those before and of those after. Other arguments as in `grid`;
    what is given stands left of both.
    """
    if before.shape != after.shape:
        raise ContractError(f"before {tuple(before.shape)} and after {tuple(after.shape)} must have one shape")
    captions = _plain(_checked(before, labels))
    titles, frames = ("before", "after"), None
    if marked is not None:
        for each in marked:
            _check_marks(before, each)
        both = list(zip(*marked, strict=True))
        for caption, pair in zip(captions, both, strict=True):
            caption.extend((f"{title}: {mark[0]}", _ink(mark), 1) for title, mark in zip(titles, pair, strict=True))
        frames = [[mark[1] for mark in pair] for pair in both]
    pairs = [[_enlarged(left, None), _enlarged(right, None)] for left, right in zip(before, after, strict=True)]
    return _beside_given(pairs, captions, columns, given, titles=titles, frames=frames)


def answered(
    pictures: Sequence[Sequence[Tensor]],
    questions: Sequence[str],
    verdicts: Sequence[Mark],
    columns: int | None = None,
) -> Image.Image:
    """A grid of samples: the images of each side by side, its question, and what was answered below.

    images: any number per sample, [3, H, W] in [0, 1] of any size. verdicts: the answer, and whether it is right, which
    colours it; None leaves it black. Raises ContractError if the numbers of samples differ.
    """
    if not len(pictures) == len(questions) == len(verdicts) or not pictures:
        raise ContractError(f"{len(pictures)} samples, {len(questions)} questions and {len(verdicts)} verdicts")
    shown = _boxes(pictures, TARGET_SIDE, at_least=1)
    most = len(shown[0])
    width = most * TARGET_SIDE + (most - 1) * (MARGIN // 2)
    captions = [
        [(question, INK, MAX_CAPTION_LINES - 1), (verdict[0], _ink(verdict), 1)]
        for question, verdict in zip(questions, verdicts, strict=True)
    ]
    return _assembled(shown, captions, columns or max(1, min(len(shown), SHEET_WIDTH // width)))


def _checked(images: Tensor, labels: Sequence[str] | None) -> list[str]:
    if images.ndim != 4 or images.shape[0] == 0 or images.shape[1] not in (1, 3):
        raise ContractError(f"a grid needs images [N, 3, H, W] with N > 0, got {tuple(images.shape)}")
    captions = [""] * len(images) if labels is None else list(labels)
    if len(captions) != len(images):
        raise ContractError(f"{len(captions)} labels for {len(images)} images")
    return captions


def _check_marks(images: Tensor, marked: Sequence[Mark]) -> None:
    if len(marked) != len(images):
        raise ContractError(f"{len(marked)} marks for {len(images)} images")


def _ink(mark: Mark) -> tuple[int, int, int]:
    return INK if mark[1] is None else GREEN if mark[1] else RED


def _enlarged(image: Tensor, scale: int | None) -> Image.Image:
    array = image.detach().float().clamp(0, 1).mul(255).round().byte().cpu()
    array = array.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(array, "RGB")
    longest = max(picture.size)
    if scale is None and longest > MAX_SIDE:
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        return picture
    factor = scale if scale is not None else max(1, min(TARGET_SIDE // min(picture.size), MAX_SIDE // longest))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _boxes(images: Sequence[Sequence[Tensor]], side: int, at_least: int = 0) -> list[list[Image.Image]]:
    """The images of each sample, as many squares of `side` pixels for all: blank ones where another sample has more."""
    most = max(at_least, *(len(each) for each in images))
    return [[_boxed(image, side) for image in each] + [_boxed(None, side)] * (most - len(each)) for each in images]


def _boxed(image: Tensor | None, side: int) -> Image.Image:
    """An image in a square of `side` pixels, enlarged by a whole factor or made smaller; None is a blank square."""
    square = Image.new("RGB", (side, side), BACKGROUND)
    if image is not None:
        picture = _enlarged(image, max(1, TARGET_SIDE // max(image.shape[-2:])))
        picture.thumbnail((side, side))
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def _plain(captions: list[str]) -> list[Caption]:
    return [[(caption, INK, MAX_CAPTION_LINES)] for caption in captions]


def _beside_given(
    cells: list[list[Image.Image]],
    captions: list[Caption],
    columns: int | None,
    given: Sequence[Sequence[Tensor]],
    *,
    titles: tuple[str, ...],
    frames: list[list[bool | None]] | None,
) -> Image.Image:
    """Cells with the images that their prompts show on their left, as high as they are."""
    if given and len(given) != len(cells):
        raise ContractError(f"given images of {len(given)} prompts for {len(cells)} samples")
    if any(given):
        boxes = _boxes(given, cells[0][0].height)
        num_given = len(boxes[0])
        cells = [left + right for left, right in zip(boxes, cells, strict=True)]
        titles = ("given",) * num_given + titles
        frames = None if frames is None else [[None] * num_given + frame for frame in frames]
    columns = columns or max(1, math.ceil(math.sqrt(len(cells) / len(cells[0]))))
    return _assembled(cells, captions, columns, titles, frames)


def _assembled(
    cells: list[list[Image.Image]],
    captions: list[Caption],
    columns: int,
    titles: Sequence[str] = (),
    frames: list[list[bool | None]] | None = None,
) -> Image.Image:
    font = ImageFont.load_default(FONT_SIZE)
    gap = MARGIN // 2 if frames is None else 2 * FRAME + 2
    width = sum(picture.width for picture in cells[0]) + gap * (len(cells[0]) - 1)
    height = cells[0][0].height
    line_height = FONT_SIZE + 3
    wrapped = [
        [(line, ink) for text, ink, most in caption for line in _wrapped(text, width, font, most)]
        for caption in captions
    ]
    caption_height = line_height * max(len(lines) for lines in wrapped)
    title_height = line_height if titles else 0
    columns = min(columns, len(cells))
    rows = math.ceil(len(cells) / columns)
    step_x, step_y = width + 2 * MARGIN, height + caption_height + 2 * MARGIN
    canvas = Image.new("RGB", (columns * step_x, rows * step_y + title_height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for index, (pictures, lines) in enumerate(zip(cells, wrapped, strict=True)):
        left = (index % columns) * step_x + MARGIN
        top = (index // columns) * step_y + title_height + MARGIN
        for number, picture in enumerate(pictures):
            x = left + number * (picture.width + gap)
            canvas.paste(picture, (x, top))
            if frames is not None and frames[index][number] is not None:
                box = (x - FRAME, top - FRAME, x + picture.width + FRAME - 1, top + picture.height + FRAME - 1)
                draw.rectangle(box, outline=GREEN if frames[index][number] else RED, width=FRAME)
            if titles and index < columns:
                draw.text((x, MARGIN // 2), titles[number], fill=INK, font=font)
        for number, (line, ink) in enumerate(lines):
            draw.text((left, top + height + FRAME + 1 + number * line_height), line, fill=ink, font=font)
    return canvas


def _wrapped(caption: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, max_lines: int) -> list[str]:
    if not caption:
        return []
    per_character = max(font.getlength(caption) / len(caption), 1.0)
    lines = textwrap.wrap(" ".join(caption.split()), max(4, int(width / per_character)))
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], lines[max_lines - 1].rstrip() + " ..."]
    return lines
