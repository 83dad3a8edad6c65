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
LTX23_IS_NOT_COMPARED = "its LTX-2 has not been compared with LTX-2.3, and is given LTX-2 alone."

RULES = (
    family_is_served(
        BUNDLES,
        without=("WanAnimateBundle", "LTX23Bundle"),
        reasons={"Flux2DevBundle": FLUX2_DEV_IS_NOT_COMPARED, "LTX23Bundle": LTX23_IS_NOT_COMPARED},
    ),
    kernel_is_served(KERNELS),
    sampling_is_served,
    experts_switch_as_released,
)
