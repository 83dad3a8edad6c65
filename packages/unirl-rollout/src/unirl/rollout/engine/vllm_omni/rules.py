"""What vLLM-Omni needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.child.rules import gpus_are_here, gpus_suffice
from unirl.rollout.engine.served_latents.rules import family_is_served, kernel_is_served, sampling_is_served

BUNDLES = (
    "SD3Bundle",
    "Flux2KleinBundle",
    "QwenImageBundle",
    "WanBundle",
    "HunyuanVideo15Bundle",
    "BagelBundle",
    "HunyuanImage3Bundle",
)
KERNELS = ("FlowSDEStrategy", "CPSSDEStrategy", "DanceSDEStrategy", "DDIMStrategy")

RULES = (
    family_is_served(BUNDLES),
    kernel_is_served(KERNELS),
    sampling_is_served,
    gpus_suffice("num_gpus"),
)
MACHINE_RULES = (gpus_are_here("num_gpus"),)
