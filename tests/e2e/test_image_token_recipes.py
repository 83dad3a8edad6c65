"""Recipes of images that are drawn token by token, run whole on few samples of a random Janus."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.tracking.sample_files import read_samples
from unirl.trainer.commands import run_recipe
from unirl.types.samples import Image

tiny_janus: Any = importlib.import_module("packages.unirl-models.tests.tiny_janus")

FEW = (
    *("runtime=local", "num_devices=1", "device=cpu", "bundle.dtype=fp32", "backend.fsdp.param_dtype=fp32"),
    *("parts/reward=compressibility", "num_rollouts=2", "batch_size=2", "sampling.samples_per_prompt=4"),
    *("sampling.max_new_tokens=16", "media_interval=1", "save.interval=0", "stack.micro_batch_size=3"),
    *("eval.interval=2", "eval.num_samples=2", "engine.forward_batch_size=3"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("janus")
    tiny_janus.save_janus(tiny_janus.janus(), made / "model")
    (made / "prompts.txt").write_text("a red circle\ntwo cats\n")
    return made


@pytest.mark.parametrize("options", [(), ("parts/train=lora", "sampling.guidance_scale=1.0")], ids=["full", "lora"])
def test_the_recipe_of_real_size_runs_on_a_random_model(options: tuple[str, ...], folder: Path, tmp_path: Path):
    register_resolvers()
    data = [f"{key}={folder / 'prompts.txt'}" for key in ("data.path", "eval.prompts")]
    model = f"bundle.pretrained_model={folder / 'model'}"
    recipe = resolve(compose("janus/grpo", [*options, *FEW, *data, model]))
    check_recipe(recipe)
    summary = run_recipe(run_of(recipe), tmp_path, [])
    assert summary["first_ratio_max_abs_dev"] == 0.0
    assert 0 < summary["logp_gap"]["max"] < 5e-5  # rollouts decode with a cache, and guidance multiplies rounding
    records = list(read_samples(tmp_path / "samples" / "rollout-000001.jsonl"))
    assert {record.end for record in records} == {"completed"}
    assert all(isinstance(each.media, Image) and each.media.pixels.shape == (3, 16, 16) for each in records)
    assert torch.tensor([record.scores["reward"] for record in records]).std() > 0
