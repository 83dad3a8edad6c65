"""What an SGLang server needs of the rest of a recipe and of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.rollout.engine.child.rules import gpus_are_here, gpus_suffice
from unirl.rollout.engine.tensor_parallel import heads_divide
from unirl.types.recipe import Machine, Messages, Part, Run

_PATCH = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 14}
"""Sizes of a patch in a configuration of Qwen2.5-VL, by default; the last is a side."""
_PATCH_NUMBERS = 3 * 2 * 14 * 14
"""Of the only patch that SGLang 0.5.23 encodes (Qwen2_5_VLForConditionalGeneration.get_image_feature)."""


def adapters_need_a_gpu(at: str, rank: object) -> str:
    """Why the engine at `at` takes no adapters on a CPU, and what to do."""
    return (
        f"{at}.max_lora_rank = {rank}, but SGLang's adapters need a GPU. Push whole weights, in which adapters are "
        f"merged: {at}.max_lora_rank: null, sync._target_: unirl.distributed.weight_sync.full.FullWeightSync."
    )


def adapters_are_served(own: Part, run: Run) -> Messages:
    """A server that is started on a CPU takes whole weights."""
    rank = own.get("max_lora_rank")
    if run.device == "cpu" and own.get("url") is None and rank is not None:
        yield adapters_need_a_gpu(own.at, rank)


def several_servers(at: str, num: object) -> str:
    """Why the engine at `at` is not several, and what to do."""
    return f"{at}.num_instances = {num}, but {at}.url names one server that runs already. Set one of them alone."


def servers_are_started(own: Part, run: Run) -> Messages:
    """Several instances are servers that the engine starts."""
    num = own.get("num_instances", 1)
    if own.get("url") is not None and num > 1:
        yield several_servers(own.at, num)


def pictures_are_seen(own: Part, run: Run, machine: Machine) -> Messages:
    """SGLang sees pictures as a model of this machine does."""
    path = Path(str(own.node.get("model"))) / "config.json"
    if path.is_file():
        yield from unseen_pictures(own.at, json.loads(path.read_text(encoding="utf-8")))


def unseen_pictures(at: str, config: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON
    """Why SGLang does not see pictures with the model of a configuration, for the engine at `at`."""
    if config.get("model_type") != "qwen2_5_vl":
        return
    vision = config.get("vision_config", {})
    sizes = [vision.get(name, default) for name, default in _PATCH.items()]
    numbers = math.prod((*sizes, sizes[-1]))
    if numbers != _PATCH_NUMBERS:
        product = " * ".join(map(str, (*sizes, sizes[-1])))
        yield (
            f"{at}.model has patches of {product} = {numbers} numbers. SGLang sees pictures by Qwen2.5-VL alone with "
            f"{_PATCH_NUMBERS}, and would take others for embeddings. Sample with vLLM: {at}._target_: "
            "unirl.rollout.engine.vllm_llm.engine.VLLMRolloutEngine."
        )


RULES = (adapters_are_served, servers_are_started, gpus_suffice("tensor_parallel_size"))
MACHINE_RULES = (gpus_are_here("tensor_parallel_size"), heads_divide, pictures_are_seen)
