"""Rules of vLLM about the recipe and this machine. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.rollout.engine.served_text.rules import has_linear_attention, weights_have_the_names_of_the_folder
from unirl.rollout.engine.tensor_parallel import heads_divide
from unirl.types.device_kinds import kind_of
from unirl.types.recipe import Machine, Messages, Part, Run


def adapters_in_float32(at: str, rank: object) -> str:
    """Message: the engine at `at` takes no adapters in float32 on an accelerator."""
    return (
        f"{at}.dtype = fp32 with {at}.max_lora_rank = {rank}, but vLLM's adapters on a GPU need bf16 or fp16. Set "
        f"{at}.dtype: bf16, or push whole weights, in which adapters are merged: {at}.max_lora_rank: null, "
        "sync._target_: unirl.distributed.weight_sync.full.FullWeightSync."
    )


def adapters_have_kernels(own: Part, run: Run) -> Messages:
    """vLLM multiplies adapters in the dtype of its model, for which it has kernels."""
    rank = own.get("max_lora_rank")
    if rank is not None and own.get("dtype") == "fp32" and kind_of(run.device).is_accelerator:
        yield adapters_in_float32(own.at, rank)


def linear_attention_has_kernels(own: Part, run: Run) -> Messages:
    """On a CPU vLLM computes linear attention in bfloat16, and keeps no prefixes of prompts that are read at once."""
    if run.device != "cpu" or not has_linear_attention(run):
        return
    if own.get("dtype") != "bf16":
        yield (
            f"{own.at}.dtype = {own.get('dtype')}, but on a CPU vLLM computes the linear attention of "
            f"{run.policy.bundle.name} in bf16 alone. Set {own.at}.dtype: bf16, or sample with the model that trains "
            "(parts/engine=text_trainside_cpu)."
        )
    if (own.get("engine_args") or {}).get("enable_prefix_caching") is not False:
        yield (
            f"{own.at} on a CPU reads prompts at once, with which vLLM keeps no prefixes of linear attention. Set "
            f"{own.at}.engine_args.enable_prefix_caching: false."
        )


def thinkers_are_whole(own: Part, run: Run, machine: Machine) -> Messages:
    """vLLM loads a whole Qwen3-Omni, of which it takes the Thinker."""
    path = Path(str(own.node.get("model"))) / "config.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("model_type") == "qwen3_omni_moe_thinker":
        yield (
            f"{own.at}.model = {path.parent} is the Thinker of a Qwen3-Omni alone, vLLM loads a whole Qwen3-Omni. Name "
            "the folder of the whole model there; its weights are replaced by the first push."
        )


RULES = (adapters_have_kernels, linear_attention_has_kernels)
MACHINE_RULES = (heads_divide, weights_have_the_names_of_the_folder, thinkers_are_whole)
