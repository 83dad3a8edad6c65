"""Prompts of a rehearsal: those that the recipe names if they are there, else stand-ins with the media of their set."""

from __future__ import annotations

import json
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.data.datasets import read_rows
from unirl.data.targets import TARGET
from unirl.datasets.catalog import set_of
from unirl.types.messages import brings_conversation
from unirl.types.preference import IMAGES, SCORES

TEXTS = [f"a picture of {number} red kites over a grey sea, seen from a small boat" for number in range(64)]
IMAGE_SIZE = 1024
"""Height and width in pixels."""
SOUND_RATE, SOUND_S = 16_000, 10
"""Samples per second, and seconds of a sound."""


def write_prompts(
    data: Mapping[str, Any],  # Any: a recipe's values
    folder: Path,
    num_frames: int,
    pair_size: tuple[int, int] | None,
    *,
    brings_targets: bool = False,
) -> dict[str, Any]:
    """The section `data` of a rehearsal.

    num_frames: of the videos that prompts bring. pair_size: (height, width) of the images of a preference, or of a
    target, for sets of them.
    """
    path = Path(str(data["path"])).expanduser()
    if path.exists():
        return dict(data)
    known = set_of(path)
    media = [
        {"modality": modality, "role": role, "uri": _write(modality, role, folder, num_frames)}
        for modality, role in (() if known is None else known.media)
    ]
    own: dict[str, Any] = {"media": media} if media else {}
    if pair_size is not None and brings_targets:
        own |= {TARGET: _write_target(folder, pair_size, num_frames)}
    elif pair_size is not None:
        own = {IMAGES: _write_pair(folder, pair_size), SCORES: [1, 0]}
    file = _write_rows(folder / "prompts.jsonl", own)
    return {**{key: value for key, value in data.items() if key != "split"}, "path": str(file)}


def eval_prompts(
    data: Mapping[str, Any],  # Any: as above
    evaluation: Mapping[str, Any] | None,  # Any: as above
    folder: Path,
    *,
    brings_images: bool,
) -> str:
    """The prompts of an evaluation: its own if they are there, else those of `data` where these are prompts alone."""
    if evaluation is not None and (own := Path(str(evaluation["prompts"])).expanduser()).exists():
        return str(own)
    if brings_images or brings_conversation(read_rows(data["path"], data.get("split"))[0].metadata):
        return str(_write_rows(folder / "eval.jsonl", {}))
    return str(data["path"])


def _write_rows(file: Path, own: Mapping[str, Any]) -> Path:  # Any: JSON
    """Write a row for each text, with values that all rows have."""
    file.write_text("".join(json.dumps({"prompt": text, **own}) + "\n" for text in TEXTS), encoding="utf-8")
    return file


def _write_target(folder: Path, size: tuple[int, int], num_frames: int) -> str:
    """Make an image, or a folder of the frames of a video; returns its name in the folder."""
    image = Image.new("RGB", size[::-1], "white")
    if num_frames == 1:
        image.save(folder / "target.png")
        return "target.png"
    (folder / "target").mkdir()
    for number in range(num_frames):
        image.save(folder / "target" / f"{number:05}.png")
    return "target"


def _write_pair(folder: Path, size: tuple[int, int]) -> list[str]:
    """Make two images; returns their names in the folder."""
    names = ["chosen.png", "rejected.png"]
    for name, colour in zip(names, ("white", "black"), strict=True):
        Image.new("RGB", size[::-1], colour).save(folder / name)
    return names


def _write(modality: str, role: str, folder: Path, num_frames: int) -> str:
    """Make a medium; returns its name in the folder."""
    if modality == "audio":
        with wave.open(str(folder / "sound.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SOUND_RATE)
            file.writeframes(bytes(2 * SOUND_RATE * SOUND_S))
        return "sound.wav"
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    if modality == "image":
        image.save(folder / f"{role}.png")
        return f"{role}.png"
    (folder / role).mkdir()
    for number in range(num_frames):
        image.save(folder / role / f"{number:05}.png")
    return role
