"""Recipe rules of vLLM-Omni. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.served_latents.rules import (
    experts_switch_as_released,
    family_is_served,
    kernel_is_served,
    sampling_is_served,
)
from unirl.types.recipe import Messages, Part, Run

BUNDLES = (
    "SD3Bundle",
    "FluxBundle",
    "Flux2KleinBundle",
    "QwenImageBundle",
    "QwenImageEditBundle",
    "WanBundle",
    "WanImageBundle",
    "ZImageBundle",
    "HunyuanVideo15Bundle",
    "LTX2Bundle",
    "BagelBundle",
    "HunyuanImage3Bundle",
)
WITHOUT_ADAPTERS = ("HunyuanVideo15Bundle", "BagelBundle", "HunyuanImage3Bundle")
"""Supported bundles whose adapters must be pushed merged."""
KERNELS = ("FlowSDEStrategy", "CPSSDEStrategy", "DanceSDEStrategy", "DDIMStrategy")


def pushes_are_whole(own: Part, run: Run) -> Messages:
    """Adapters of some families are pushed merged."""
    sync, bundle = run.policy.sync, run.policy.bundle
    is_merged = bool(set(bundle.class_names) & set(WITHOUT_ADAPTERS))
    if sync is not None and sync.ability("sends_adapters") and is_merged:
        rank = "" if own.get("max_lora_rank") is None else f", and {own.at}.max_lora_rank: null"
        yield (
            f"{sync.name} pushes LoRA adapters, which {own.name} does not take of {bundle.name} as they are. Set "
            f"{sync.at}._target_: unirl.distributed.weight_sync.full.FullWeightSync, which merges them{rank}."
        )


RULES = (
    family_is_served(BUNDLES, without=("WanAnimateBundle",)),
    kernel_is_served(KERNELS),
    sampling_is_served,
    experts_switch_as_released,
    pushes_are_whole,
)
