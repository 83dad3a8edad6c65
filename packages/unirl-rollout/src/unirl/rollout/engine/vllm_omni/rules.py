"""Recipe rules of vLLM-Omni. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.served_latents.rules import (
    FLUX2_DEV_IS_NOT_COMPARED,
    experts_switch_as_released,
    family_is_served,
    kernel_is_served,
    sampling_is_served,
)

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
KERNELS = ("FlowSDEStrategy", "CPSSDEStrategy", "DanceSDEStrategy", "DDIMStrategy")


RULES = (
    family_is_served(BUNDLES, without=("WanAnimateBundle",), reasons={"Flux2DevBundle": FLUX2_DEV_IS_NOT_COMPARED}),
    kernel_is_served(KERNELS),
    sampling_is_served,
    experts_switch_as_released,
)
