"""The recipe of Qwen3-Omni's Thinker, run whole on a random model and rows that bring sounds and images."""

import importlib
import json
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.trainer.commands import export_recipe, run_recipe
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

tiny: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")

SMALL = [
    *("runtime=local", "num_devices=1", "device=cpu", "bundle.dtype=fp32", "backend.fsdp.param_dtype=fp32"),
    *("bundle.max_pixels=4096", "pipeline.system_prompt=Choose.", "eval.interval=2", "eval.batch_size=4"),
    *("num_rollouts=2", "batch_size=2", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=6"),
    *("eval.num_samples=3", "stack.num_updates_per_batch=2", "save.interval=2", "guardrails.action=off"),
]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and three questions: about a sound, about both, and about an image."""
    folder = tmp_path_factory.mktemp("heard")
    tiny.save_omni_model(tiny.qwen3_omni(), folder / "model")
    Image.new("RGB", (40, 30), "red").save(folder / "a.png")
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(torch.randint(-9999, 9999, (4000,), dtype=torch.int16).numpy().tobytes())
    asked = [
        {"problem": "Who speaks?", "audio": "a.wav", "choices": ["he", "she"], "answer": "A"},
        {"problem": "<audio> of <image>?", "audio": "a.wav", "images": ["a.png"], "choices": ["a", "b"], "answer": "B"},
        {"problem": "Which color?", "images": ["a.png"], "choices": ["red", "blue"], "answer": "red"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return folder


def composed(heard: Path, *overrides: str) -> Any:
    register_resolvers()
    places = [f"bundle.pretrained_model={heard / 'model'}", f"data.path={heard / 'rows.jsonl'}"]
    places.append(f"eval.prompts={heard / 'rows.jsonl'}")
    return resolve(compose("vlm/qwen3_omni_thinker_gspo", [*SMALL, *places, *overrides]))


FORM = {"_target_": "unirl.reward.local.texts.format.FormatScorer", "pattern": "[^a-m]*"}
"""What about half of the answers of a random model are."""


def test_sounds_and_images_are_asked_about_and_the_decoder_alone_learns(heard: Path, tmp_path: Path):
    recipe = composed(heard)
    recipe["reward"]["scorers"]["form"] = FORM
    check_recipe(recipe, Machine(num_cpus=2, num_gpus=0))
    summary = run_recipe(run_of(recipe), tmp_path / "run", [])
    assert summary["first_ratio_max_abs_dev"] == 0.0
    assert {"mc_exact_match", "form"} <= summary["eval_after"]["overall"].keys()
    export_recipe(run_of(recipe), tmp_path / "run", tmp_path / "merged", merged=True)
    loaded = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tmp_path / "merged")
    before = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(heard / "model").state_dict()
    moved = {name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"model.layers.{k}.self_attn.{name}_proj.weight" for k in range(2) for name in "qkvo"}


def test_sounds_that_would_not_be_heard_are_refused(heard: Path):
    deaf = "unirl.models.qwen_vl"
    changes = [f"bundle._target_={deaf}.bundle.QwenVLBundle", f"pipeline._target_={deaf}.pipeline.QwenVLPipeline"]
    with pytest.raises(ConfigError, match=r"2 rows \(.*\) bring a sound, but bundle QwenVLBundle .* \(reads_audio\)"):
        check_recipe(composed(heard, *changes), Machine(num_cpus=2, num_gpus=0))
