"""A small checkpoint of a family of which none comes with the trainer, written where the matrix is measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import unirl.worlds.shapes


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
