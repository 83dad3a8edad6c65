"""Folders of releases without weights: their text encoders and autoencoders have the published sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from unirl.models.causal_lm.construction import from_configuration as of_transformers
from unirl.models.diffusers_pipeline.construction import from_configuration
from unirl.models.packed.weights import SINGLE, tensor_shapes
from unirl.models.released import all_released
from unirl.models.releases.configurations import settings_of
from unirl.models.releases.folder import ALIASES, LIBRARIES, is_known, write_configurations
from unirl.models.releases.unified import UNIFIED_MODELS
from unirl.types.errors import ConfigError

KNOWN = [hub_id for hub_id in all_released() if is_known(hub_id)]
QUICK = ("stabilityai/stable-diffusion-3.5-medium",)
OTHER_PARTS = {
    # Counted with an output projection that prompts do not pass, or with a vision tower.
    "hunyuanvideo-community/HunyuanVideo": 0.52,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 1.22,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": 1.22,
    # Its last layers, its head and its vision tower are let go.
    "MiniMaxAI/MiniMax-H3": -8.2,
}
"""Billions in the table of sizes that the release's folder does not have; below 0, that the folder has more."""


def test_every_model_with_a_published_size_is_known() -> None:
    assert set(KNOWN) == set(all_released())


@pytest.mark.parametrize(
    "hub_id",
    [
        pytest.param(hub_id, marks=() if hub_id in QUICK else pytest.mark.matrix)
        for hub_id in sorted(set(KNOWN) - {*ALIASES, *UNIFIED_MODELS})
    ],
)
def test_frozen_models_have_the_published_size(hub_id: str, tmp_path: Path) -> None:
    sizes = all_released()[hub_id]
    write_configurations(hub_id, tmp_path)
    [file] = tmp_path.glob("*model_index.json")
    index = json.loads(file.read_text())
    text = sum(_billions(tmp_path, name, index[name]) for name in index if _is_text(name, index[name]))
    assert text == pytest.approx(sizes.text - OTHER_PARTS.get(hub_id, 0.0), rel=0.03)
    assert _billions(tmp_path, "vae", index["vae"]) == pytest.approx(sizes.vae, rel=0.03)


@pytest.mark.parametrize(
    ("hub_id", "model_class", "billions"),
    [
        ("Qwen/Qwen3-4B-Base", transformers.AutoModelForCausalLM, 4.02),
        ("Qwen/Qwen2.5-VL-7B-Instruct", transformers.AutoModelForImageTextToText, 8.29),
        ("Qwen/Qwen3.5-0.8B", transformers.AutoModelForImageTextToText, 0.853),
        ("Qwen/Qwen3.5-4B", transformers.AutoModelForImageTextToText, 4.54),
        ("Qwen/Qwen3.5-9B", transformers.AutoModelForImageTextToText, 9.41),
        ("Qwen/Qwen3.5-9B", transformers.AutoModelForCausalLM, 8.95),
        ("Qwen/Qwen3.5-35B-A3B", transformers.AutoModelForImageTextToText, 35.1),
        ("Qwen/Qwen3.5-27B", transformers.AutoModelForImageTextToText, 27.4),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", transformers.Qwen3OmniMoeThinkerForConditionalGeneration, 31.7),
        ("deepseek-community/Janus-Pro-1B", transformers.JanusForConditionalGeneration, 2.09),
        ("deepseek-community/Janus-Pro-7B", transformers.JanusForConditionalGeneration, 7.42),
        ("openai/clip-vit-large-patch14", transformers.CLIPModel, 0.428),
        ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", transformers.CLIPModel, 0.986),
    ],
)
def test_models_of_one_folder_have_the_published_size(
    hub_id: str, model_class: Any, billions: float, tmp_path: Path
) -> None:
    write_configurations(hub_id, tmp_path)
    model = of_transformers(model_class, tmp_path, torch.bfloat16, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("hub_id", sorted(UNIFIED_MODELS))
def test_files_of_unified_models_have_the_published_size_and_take_no_disk(hub_id: str, tmp_path: Path) -> None:
    write_configurations(hub_id, tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    sizes = all_released()[hub_id]
    published = sizes.trained + sizes.vae + sizes.beside
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(published, rel=0.03)
    assert sum(file.stat().st_blocks * 512 for file in files) < 10_000_000


def test_files_of_hunyuan_image3_name_each_expert(tmp_path: Path) -> None:
    write_configurations("tencent/HunyuanImage-3.0-Instruct", tmp_path)
    shapes = tensor_shapes(tmp_path / SINGLE)
    assert shapes["model.layers.31.mlp.experts.63.down_proj.weight"] == (4096, 3072)
    assert not any(name.endswith("experts.down_proj") for name in shapes)


def _is_text(name: str, entry: Any) -> bool:
    is_encoder = name.startswith("text_encoder") or name == "connectors"
    return is_encoder and isinstance(entry, list) and entry[1] is not None


def _billions(folder: Path, name: str, entry: list[Any]) -> float:
    model_class = getattr(LIBRARIES[entry[0]], entry[1])
    model = from_configuration(model_class, folder / name, torch.bfloat16, "meta")
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def test_a_language_model_has_the_published_size() -> None:
    config = transformers.Qwen3MoeConfig(**settings_of("Qwen/Qwen3-30B-A3B", "model", "Qwen3MoeForCausalLM"))
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    others = sum(parameter.numel() for parameter in model.parameters()) - experts
    assert experts + others == pytest.approx(30.5e9, rel=0.002)
    assert others + experts * 8 // 128 == pytest.approx(3.3e9, rel=0.02)  # what a token uses


def test_a_release_that_is_not_known_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"someone/something are not known.*hf download"):
        write_configurations("someone/something", tmp_path)
