"""The pretraining scripts of the shipped diffusion bases, run whole with a few steps per stage."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unirl.worlds.moves.world
import unirl.worlds.shapes.world
import unirl.worlds.sounds.world
from unirl.worlds.moves import world as moves

SHAPES = Path(unirl.worlds.shapes.world.__file__).parent
MOVES = Path(unirl.worlds.moves.world.__file__).parent
SOUNDS = Path(unirl.worlds.sounds.world.__file__).parent

MEASURED = ("latents_mean", "latents_std", "scaling_factor", "shift_factor")
"""What an autoencoder's configuration says of the latents that it has learned."""
WRITER = ("_diffusers_version", "transformers_version", "_name_or_path", "is_local", "local_files_only")


SOME_MOVES = moves.all_specs()[::15]
"""Without near misses, which could be scenes of the other requests."""


@dataclass(frozen=True)
class Script:
    """A script, a command line of few steps, and what makes its data few."""

    module: str
    steps: dict[str, int]
    data: dict[str, Any]
    shipped: Path


SCRIPTS = {
    "shapes": Script(
        "unirl.worlds.shapes.pretrain",
        {"text": 2, "autoencoder": 4, "transformer": 2},
        {"unirl.worlds.shapes.pretrain.DRAWINGS_PER_LAYOUT": 1, "unirl.worlds.shapes.pretrain.CAPTIONED_LAYOUTS": 2},
        SHAPES / "checkpoint",
    ),
    "flux2": Script(
        "unirl.worlds.shapes.pretrain_flux2",
        {"text": 2, "transformer": 2},
        {"unirl.worlds.shapes.pretrain.DRAWINGS_PER_LAYOUT": 1, "unirl.worlds.shapes.pretrain.CAPTIONED_LAYOUTS": 2},
        SHAPES / "checkpoint_flux2",
    ),
    "codes": Script(
        "unirl.worlds.shapes.codes.pretrain",
        {"codes": 4, "drawing": 2},
        {
            "unirl.worlds.shapes.codes.pretrain.DRAWINGS_PER_LAYOUT": 1,
            "unirl.worlds.shapes.codes.pretrain.CAPTIONED_LAYOUTS": 2,
        },
        SHAPES / "codes" / "checkpoint",
    ),
    "edits": Script(
        "unirl.worlds.shapes.edits.pretrain",
        {"encoder": 2, "autoencoder": 4, "transformer": 2},
        {"unirl.worlds.shapes.edits.pretrain.NUM_SOURCES": 40},
        SHAPES / "edits" / "checkpoint",
    ),
    "moves": Script(
        "unirl.worlds.moves.pretrain",
        {"text": 2, "autoencoder": 4, "transformer": 2},
        {
            "unirl.worlds.moves.world.all_specs": lambda: SOME_MOVES,
            "unirl.worlds.moves.world.NEAR_MISS_FRACTION": 0.0,
            "unirl.worlds.moves.pretrain.AUTOENCODER_SCENES": 32,
            "unirl.worlds.moves.pretrain.DRAWINGS_PER_SCENE": 1,
            "unirl.worlds.moves.pretrain.CAPTIONED_SCENES": 2,
        },
        MOVES / "checkpoint",
    ),
    "sounds": Script(
        "unirl.worlds.sounds.pretrain",
        {"text": 2, "video": 4, "audio": 4, "vocoder": 2, "transformer": 2},
        {
            "unirl.worlds.sounds.pretrain.NUM_VIDEOS": 45,
            "unirl.worlds.sounds.pretrain.NUM_SOUNDS": 30,
            "unirl.worlds.sounds.pretrain.DRAWINGS": 1,
            "unirl.worlds.sounds.pretrain.CAPTIONED": 2,
        },
        SOUNDS / "checkpoint",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in ("edits", "moves", "sounds") else ()) for name in SCRIPTS],
)
def test_a_script_makes_a_folder_like_the_shipped_one_and_judges_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = SCRIPTS[name]
    module = importlib.import_module(script.module)
    for path, value in script.data.items():
        monkeypatch.setattr(path, value)
    steps = [word for stage, number in script.steps.items() for word in (f"--{stage}-steps", str(number))]
    monkeypatch.setattr(sys, "argv", ["pretrain", "--out", str(tmp_path), "--seed", "1", *steps])
    with caplog.at_level("INFO"):
        module.main()
    assert [record.message for record in caplog.records if record.message.startswith("held-out: {'strict': ")]
    assert files(tmp_path) == files(script.shipped)
    for file in files(tmp_path):
        if file.endswith(".safetensors"):
            made, shipped = load_file(tmp_path / file), load_file(script.shipped / file)
            assert layout(made) == layout(shipped), file
            assert all(bool(torch.isfinite(value).all()) for value in made.values()), file
        elif file.endswith(".json"):
            assert settings(tmp_path / file) == settings(script.shipped / file), file


def files(folder: Path) -> list[str]:
    """All files in a checkpoint, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def layout(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every weight."""
    return {name: (value.shape, value.dtype) for name, value in state.items()}


def settings(path: Path) -> dict[str, Any]:
    """What a configuration says besides what was measured and who wrote it."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name not in (*MEASURED, *WRITER)}
