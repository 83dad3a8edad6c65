"""Folders of classes that the installed libraries lack, or that are of another family, are refused by name."""

import importlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.installed import wrong_component, wrong_model, wrong_pipeline
from unirl.models.loading import open_pipeline_folder
from unirl.models.minimax_h3.bundle import MiniMaxH3Bundle
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.sdxl.bundle import SDXLBundle
from unirl.models.wan.bundle import WanBundle
from unirl.types.errors import ConfigError

MODELS = Path(inspect.getfile(CausalLMBundle)).parents[1]
DIFFUSERS, TRANSFORMERS = (f"the installed {name} {version(name)}" for name in ("diffusers", "transformers"))


def folder_of(folder: Path, file: str, content: dict[str, Any]) -> str:
    (folder / file).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("make", "file", "content", "parts"),
    [
        (
            WanBundle,
            "model_index.json",
            {"_class_name": "MiniMaxMusic3Pipeline"},
            [
                "holds a MiniMaxMusic3Pipeline",
                f"which {DIFFUSERS} does not have",
                "a folder of WanPipeline",
            ],
        ),
        (
            WanBundle,
            "modular_model_index.json",
            {"_class_name": "MiniMaxMusic3ModularPipeline"},
            [
                "holds a MiniMaxMusic3ModularPipeline, a pipeline of blocks (modular_model_index.json); its",
                f"MiniMaxMusic3Pipeline is a class which {DIFFUSERS} does not have. Give a folder of WanPipeline",
            ],
        ),
        (
            MiniMaxH3Bundle,
            "modular_model_index.json",
            {"_class_name": "MiniMaxMusic3ModularPipeline"},
            ["holds a MiniMaxMusic3ModularPipeline, a pipeline of", "Give a folder of MiniMaxH3ModularPipeline"],
        ),
        (
            MiniMaxH3Bundle,
            "model_index.json",
            {"_class_name": "WanPipeline"},
            ["holds a WanPipeline; this model needs a MiniMaxH3ModularPipeline. Point"],
        ),
        (
            SDXLBundle,
            "model_index.json",
            {"_class_name": "StableDiffusionXLImg2ImgPipeline"},
            ["holds a StableDiffusionXLImg2ImgPipeline; this model needs a StableDiffusionXLPipeline. Point"],
        ),
        (
            Qwen3Bundle,
            "config.json",
            {"model_type": "minimax_next"},
            ["of type 'minimax_next'", f"which {TRANSFORMERS} does not have", "a checkpoint of qwen3"],
        ),
        (
            CausalLMBundle,
            "config.json",
            {"model_type": "minimax_next"},
            ["of type 'minimax_next'", f"which {TRANSFORMERS} does not have", "upgrade the library"],
        ),
        (Qwen3Bundle, "config.json", {"model_type": "llama"}, ["of type 'llama'; this bundle loads qwen3."]),
    ],
)
def test_a_folder_of_another_class_names_it_and_the_library_that_lacks_it(
    make: Any, file: str, content: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(folder_of(tmp_path, file, content))
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and [part for part in parts if part not in message] == []


def test_a_component_that_no_library_has_is_named_with_it(tmp_path: Path) -> None:
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanNextTransformer3DModel"]}
    folder = open_pipeline_folder(folder_of(tmp_path, "model_index.json", index), ["WanPipeline"])
    with pytest.raises(ConfigError, match=r"'transformer' is a WanNextTransformer3DModel, which the installed .* need"):
        folder.require("transformer", ["WanTransformer3DModel"])


def bundles() -> list[type]:
    found = {}
    for path in [*MODELS.glob("*/bundle.py"), MODELS / "sd3" / "controlnet.py"]:
        module = importlib.import_module(f"unirl.models.{path.parent.name}.{path.stem}")
        found |= {each.__qualname__: each for each in vars(module).values() if inspect.isclass(each)}
    return list(found.values())


def test_what_the_families_load_is_in_the_installed_libraries() -> None:
    """Otherwise a message would blame a library that has it."""
    pipelines = {name for each in bundles() for name in getattr(each, "pipeline_classes", ())}
    types = {name for each in bundles() for name in getattr(each, "model_types", ())}
    assert len(pipelines) > 20 and len(types) > 5
    blamed = [name for name in pipelines if "does not have" in wrong_pipeline("a", name, ["other"])]
    blamed += [name for name in types if "does not have" in (wrong_model("a", name, ["other"]) or "")]
    assert blamed == []
    for name in ("WanTransformer3DModel", "T5EncoderModel", "Qwen2_5_VLForConditionalGeneration", "CLIPTextModel"):
        assert "does not have" not in wrong_component("a", "b", name, ["other"])
