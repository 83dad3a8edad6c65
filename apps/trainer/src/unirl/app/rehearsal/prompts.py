"""Prompts of a rehearsal: those that the recipe names if they are there, else stand-ins with the media of their set."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.datasets.catalog import set_of

TEXTS = [f"a picture of {number} red kites over a grey sea, seen from a small boat" for number in range(64)]
IMAGE_SIZE = 1024
"""Height and width in pixels."""
SOUND_RATE, SOUND_S = 16_000, 10
"""Samples per second, and seconds of a sound."""


def write_prompts(data: Mapping[str, Any], folder: Path, num_frames: int) -> dict[str, Any]:  # Any: a recipe's values
    """The section `data` of a rehearsal. num_frames: of the videos that prompts bring."""
    path = Path(str(data["path"])).expanduser()
    if path.exists():
        return dict(data)
    known = set_of(path)
    media = [
        {"modality": modality, "role": role, "uri": _write(modality, role, folder, num_frames)}
        for modality, role in (() if known is None else known.media)
    ]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in _rows(media)), encoding="utf-8")
    return {**{key: value for key, value in data.items() if key != "split"}, "path": str(file)}


def _rows(media: list[dict[str, str]]) -> Iterator[dict[str, Any]]:  # Any: JSON
    for text in TEXTS:
        yield {"prompt": text, **({"media": media} if media else {})}


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
