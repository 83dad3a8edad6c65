"""What a case needs and does not come with the trainer, written where the matrix is measured."""

from __future__ import annotations

import json
import shutil
from itertools import cycle
from pathlib import Path

import unirl.worlds.shapes
from unirl.datasets.controls import HOLES_IN, hole

_SIDE = 32
_NUM_PROMPTS = 64


def write_qwen_image(folder: Path) -> None:
    """The Qwen-Image-Edit of the shapes world as a model that is given text alone: its parts are those of Qwen-Image.

    Trained on instructions: what it draws is no image of a prompt, and depends on the prompt all the same.
    """
    (world,) = unirl.worlds.shapes.__path__
    shutil.copytree(Path(world) / "edits" / "checkpoint", folder, ignore=shutil.ignore_patterns("processor"))
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    del index["processor"]
    path.write_text(json.dumps({**index, "_class_name": "QwenImagePipeline"}), encoding="utf-8")


def write_holes(folder: Path) -> None:
    """The first prompts and images of the edits world with a hole each, in `folder`/prompts.jsonl."""
    (world,) = unirl.worlds.shapes.__path__
    edits = Path(world) / "edits" / "data"
    folder.mkdir(parents=True)
    shutil.copy(edits / "train.png", folder)
    for kind in HOLES_IN:
        hole(kind, kind).resize((_SIDE, _SIDE)).convert("1").save(folder / f"{kind}.png")
    lines = (edits / "train.jsonl").read_text(encoding="utf-8").splitlines()[:_NUM_PROMPTS]
    rows = [json.loads(line) for line in lines]
    for row, kind in zip(rows, cycle(HOLES_IN), strict=False):
        row["media"].append({"modality": "image", "role": "mask", "uri": f"{kind}.png"})
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
