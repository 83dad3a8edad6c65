"""Folders of releases without weights: their text encoders and autoencoders have the published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from unirl.models.diffusers_pipeline.construction import from_configuration
from unirl.models.released import all_released
from unirl.models.releases.configurations import settings_of
from unirl.models.releases.folder import ALIASES, LIBRARIES, is_known, write_configurations
from unirl.types.errors import ConfigError

KNOWN = [hub_id for hub_id in all_released() if is_known(hub_id)]
QUICK = ("stabilityai/stable-diffusion-3.5-medium",)
OTHER_PARTS = {
    # Counted with an output projection that prompts do not pass, or with a vision tower.
    "hunyuanvideo-community/HunyuanVideo": 0.52,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 1.22,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": 1.22,
}
"""Billions in the table of sizes that the release's folder does not have."""


def test_all_but_the_models_of_our_own_are_known() -> None:
    assert {hub_id.split("/")[-1] for hub_id in set(all_released()) - set(KNOWN)} == {
        "BAGEL-7B-MoT",
        "HunyuanImage-3.0-Instruct",
    }


@pytest.mark.parametrize(
    "hub_id",
    [
        pytest.param(hub_id, marks=() if hub_id in QUICK else pytest.mark.matrix)
        for hub_id in sorted(set(KNOWN) - set(ALIASES))
    ],
)
def test_frozen_models_have_the_published_size(hub_id: str, tmp_path: Path) -> None:
    sizes = all_released()[hub_id]
    write_configurations(hub_id, tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    text = sum(_billions(tmp_path, name, index[name]) for name in index if _is_text(name, index[name]))
    assert text == pytest.approx(sizes.text - OTHER_PARTS.get(hub_id, 0.0), rel=0.03)
    assert _billions(tmp_path, "vae", index["vae"]) == pytest.approx(sizes.vae, rel=0.03)


def _is_text(name: str, entry: Any) -> bool:
    is_encoder = name.startswith("text_encoder") or name == "connectors"
    return is_encoder and isinstance(entry, list) and entry[1] is not None


def _billions(folder: Path, name: str, entry: list[str]) -> float:
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
