"""Records of samples as sheets of images, tables of texts and videos: for the trackers and the folder `samples`.

Legend: N samples, C channels, H W pixels.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image as PillowImage
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unirl.tracking.base import TableRow, Tracker
from unirl.tracking.media import Mark, answered, before_after, grid, marks
from unirl.tracking.video import STRIP_FRAMES, strip
from unirl.types.media import pixel_floats
from unirl.types.samples import Image, SampleRecord, Sound, Text, Unshown, Video

logger = logging.getLogger(__name__)

EVALUATION = "eval"
FIRST_IMAGES = "eval-000000.safetensors"
"""The images from before training, kept so that a resumed run can still show them side by side."""
NUM_PLAYED = 4
"""Videos or sounds that trackers get at a time; a grid shows frames of all videos."""


class Gallery:
    """Where samples are shown.

    metric: held-out mean that the best checkpoint is chosen by; images carry its value.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker], metric: str) -> None:
        self._folder = folder
        self._trackers = trackers
        self._metric = metric
        self._unshown: set[str] = set()

    def show(
        self,
        name: str,
        step: int,
        records: Sequence[SampleRecord],
        files: Mapping[str, Path],
        *,
        most: int | None = None,
    ) -> None:
        """Images and videos of every track as a grid, texts as a table where nothing grew from them.

        files: of the media of samples, by id. most: samples of a track that are shown; None shows all.
        A track that nothing grew from is called `name`, images that others grew from `name`-track.
        """
        leaves = {record.track for record in results(records)}
        for track in dict.fromkeys(record.track for record in records):
            own = [record for record in records if record.track == track and record.media is not None][:most]
            match own[0].media if own else None:
                case Image() | Video():
                    self._show_images(name if track in leaves else f"{name}-{track}", step, own, files)
                case Sound():
                    self._play("sound", name if track in leaves else f"{name}-{track}", step, own, files)
                case Text() if track in leaves:
                    self._show_texts(name, step, [record for record in own if record.error is None])
                case Unshown(kind) if track not in self._unshown:
                    self._unshown.add(track)
                    logger.warning("track %s holds %s, which is neither shown nor written as a file", track, kind)

    def _show_images(self, name: str, step: int, records: Sequence[SampleRecord], files: Mapping[str, Path]) -> None:
        said, prompts = _said(records, self._metric), [record.prompt for record in records]
        self._publish(name, step, image_grid(records, self._metric), prompts, said)
        self._play("video", name, step, [record for record in records if isinstance(record.media, Video)], files)
        if name == EVALUATION and step == 0:
            self._keep_first(sheet(records), said)
        elif name == EVALUATION:
            self._compare_with_first(sheet(records), prompts, said, _given_images(records))

    def _play(
        self,
        kind: Literal["video", "sound"],
        name: str,
        step: int,
        records: Sequence[SampleRecord],
        files: Mapping[str, Path],
    ) -> None:
        """The first few that have files, for the trackers."""
        said = zip(records, _said(records, self._metric), strict=True)
        playing = [
            (files[each.sample_id], f"{each.prompt}: {mark[0]}") for each, mark in said if each.sample_id in files
        ]
        if playing:
            paths, captions = map(list, zip(*playing[:NUM_PLAYED], strict=True))
            for tracker in self._trackers:
                (tracker.video if kind == "video" else tracker.sound)(name, paths, step, captions)

    def _keep_first(self, images: Tensor, said: Sequence[Mark]) -> None:
        self._write(FIRST_IMAGES, lambda file: save_file({"images": images}, file, metadata={"said": json.dumps(said)}))

    def _compare_with_first(
        self, images: Tensor, prompts: Sequence[str], said: Sequence[Mark], given: Sequence[Sequence[Tensor]]
    ) -> None:
        first = self._folder / FIRST_IMAGES
        if not first.is_file():
            return
        with safe_open(first, framework="pt") as file:
            before, known = file.get_tensor("images"), (file.metadata() or {}).get("said")
        if len(before) != len(images):
            return
        height, width = (max(before.shape[side], images.shape[side]) for side in (-2, -1))
        pair = (fitted(before, height, width), fitted(images, height, width))
        marked = None if known is None else ([(str(words), passes) for words, passes in json.loads(known)], said)
        sheets = before_after(*pair, prompts, marked=marked, given=given)
        self._write("before_after.png", sheets.save)

    def _show_texts(self, name: str, step: int, records: Sequence[SampleRecord]) -> None:
        if not records:
            return
        rows = [table_row(record) for record in records]
        for tracker in self._trackers:
            tracker.table(name, rows, step)
        given = _given_images(records)
        if given:
            prompts, verdicts = [record.prompt for record in records], [verdict(row) for row in rows]
            self._publish(name, step, answered(given, prompts, verdicts), prompts, verdicts)

    def _publish(
        self, name: str, step: int, picture: PillowImage.Image, prompts: Sequence[str], said: Sequence[Mark]
    ) -> None:
        self._write(f"{name}-{step:06d}.png", picture.save)
        captions = [f"{prompt}: {mark[0]}" for prompt, mark in zip(prompts, said, strict=True)]
        for tracker in self._trackers:
            tracker.image(name, picture, step, captions)

    def _write(self, name: str, save: Callable[[Path], None]) -> None:
        """A file that appears whole. Where that is impossible, such as on a full disk, the run continues without."""
        partial = self._folder / f"partial-{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save(partial)
            partial.replace(self._folder / name)
        except (OSError, SafetensorError) as error:
            logger.error("%s cannot be written: %s. The run continues without it.", self._folder / name, error)


def results(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Those of tracks that nothing grew from."""
    parents = {record.parent_track for record in records}
    return [record for record in records if record.track not in parents]


def image_grid(records: Sequence[SampleRecord], metric: str) -> PillowImage.Image:
    """Images and videos with their prompts, what they were drawn from and their scores; see `unirl.tracking.media.grid`
    and `marks`."""
    prompts = [record.prompt for record in records]
    return grid(sheet(records), prompts, marked=_said(records, metric), given=_given_images(records))


def sheet(records: Sequence[SampleRecord]) -> Tensor:
    """Images of records in one size, float32 [N, C, H, W] in [0, 1]: of videos a strip of frames each, of several sizes
    each as large as it fits into the largest height and width."""
    videos = [record.media.frames for record in records if isinstance(record.media, Video)]
    num_frames = min(STRIP_FRAMES, max(map(len, videos), default=STRIP_FRAMES))
    images = []
    for record in records:
        if isinstance(record.media, Video):
            images.append(pixel_floats(strip(record.media.frames, num_frames)))
        elif isinstance(record.media, Image):
            images.append(pixel_floats(record.media.pixels))
    height, width = (max(image.shape[side] for image in images) for side in (-2, -1))
    return torch.cat([fitted(image[None], height, width) for image in images])


def fitted(images: Tensor, height: int, width: int) -> Tensor:
    """Images [N, C, H, W] in [0, 1] as large as they fit into `height` x `width`, in the middle of white."""
    if images.shape[-2:] == (height, width):
        return images
    scale = min(height / images.shape[-2], width / images.shape[-1])
    size = max(1, round(images.shape[-2] * scale)), max(1, round(images.shape[-1] * scale))
    small = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    made = torch.ones(*images.shape[:2], height, width)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    made[..., top : top + size[0], left : left + size[1]] = small.clamp(0, 1)
    return made


def table_row(record: SampleRecord) -> TableRow:
    """Prompt, names of its images, completion, number of tokens, end, right answer, scores and advantage of a text, as
    far as there are any."""
    assert isinstance(record.media, Text)  # noqa: S101 - chosen by its caller
    row: TableRow = {"prompt": record.prompt}
    sources = [item.source for item in record.given if isinstance(item, Image) and item.source is not None]
    if sources:
        row["images"] = ", ".join(sources)
    row["completion"] = record.media.text
    if record.media.num_tokens is not None:
        row["tokens"] = record.media.num_tokens
    if record.end is not None:
        row["end"] = record.end
    if record.metadata.get("answer") is not None:
        row["answer"] = str(record.metadata["answer"])
    row.update(record.scores)
    if record.advantage is not None:
        row["advantage"] = record.advantage
    return row


def verdict(row: TableRow) -> Mark:
    """What to say of a completion below its images, and whether it is right: where there is a right answer, a reward of
    at least 1 says so."""
    said = str(row["completion"])
    if "answer" not in row:
        return f"{said} (reward {row['reward']:.3g})", None
    if float(row["reward"]) >= 1:
        return f"{said}: right", True
    return f"{said}: wrong, {row['answer']}", False


def _said(records: Sequence[SampleRecord], metric: str) -> list[Mark]:
    """What each was drawn from, where a model wrote that, and how it was judged."""
    judged = marks([record.scores or None for record in records], metric)
    return [
        (words if record.drawn_from is None else f"{record.drawn_from}: {words}", passes)
        for record, (words, passes) in zip(records, judged, strict=True)
    ]


def _given_images(records: Sequence[SampleRecord]) -> list[list[Tensor]]:
    """The images that each prompt shows, in [0, 1]; empty where none shows any."""
    given = [[pixel_floats(item.pixels) for item in record.given if isinstance(item, Image)] for record in records]
    return given if any(given) else []
